"""retrograd: a compiler for PyTorch's backward. It captures the live graph and preserves eager's order.

>>> import retrograd
>>> with retrograd.compiled_autograd(backend="inductor"):
...     loss.backward()

Names are imported at first use: ``import retrograd`` is fast and does not import Inductor.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from retrograd.version import VERSION

if TYPE_CHECKING:
    from retrograd.api import CompiledAutograd, compile, compiled_autograd, disable, enable, explain, reset
    from retrograd.config import Config
    from retrograd.dynamo import CompiledStep, compile_step
    from retrograd.errors import (
        BackendError,
        CallError,
        CaptureError,
        ContextError,
        ExportError,
        FallbackWarning,
        LoadError,
        LoweringError,
        OptionError,
        PassError,
        RetrogradError,
        UnlikeTracedError,
        UnsupportedTorchError,
        VerificationError,
    )
    from retrograd.events import counters

__version__ = VERSION

#: The module that defines each public name. All others are exceptions, in `retrograd.errors`.
_HOMES = {
    **dict.fromkeys(
        ["CompiledAutograd", "compile", "compiled_autograd", "disable", "enable", "explain", "reset"],
        "retrograd.api",
    ),
    **dict.fromkeys(["CompiledStep", "compile_step"], "retrograd.dynamo"),
    "Config": "retrograd.config",
    "counters": "retrograd.events",
}

__all__ = [
    "BackendError",
    "CallError",
    "CaptureError",
    "CompiledAutograd",
    "CompiledStep",
    "Config",
    "ContextError",
    "ExportError",
    "FallbackWarning",
    "LoadError",
    "LoweringError",
    "OptionError",
    "PassError",
    "RetrogradError",
    "UnlikeTracedError",
    "UnsupportedTorchError",
    "VerificationError",
    "compile",
    "compile_step",
    "compiled_autograd",
    "counters",
    "disable",
    "enable",
    "explain",
    "reset",
]


def __getattr__(name: str) -> Any:
    if name == "aot":
        return _imported("retrograd.aot")
    if name not in __all__:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}")
    return getattr(_imported(_HOMES.get(name, "retrograd.errors")), name)


def _imported(module: str) -> Any:
    """Import a module of ours. If torch lacks a name that the module imports, this torch is not supported. We
    choose the cache folder first, because torch creates it during its import."""
    if not module.endswith("errors"):
        importlib.import_module("retrograd.runtime.cache_folder").folder_in_use()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if not (error.name or "").startswith("torch."):
            raise
        errors = importlib.import_module("retrograd.errors")
        raise errors.UnsupportedTorchError(importlib.metadata.version("torch"), [str(error)]) from error


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
