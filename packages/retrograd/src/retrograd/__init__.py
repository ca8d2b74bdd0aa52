"""retrograd: PyTorch's backward, captured as it hangs from the loss, compiled, in eager's order.

>>> import retrograd
>>> with retrograd.compiled_autograd(backend="inductor"):
...     loss.backward()

Names are imported at first use: ``import retrograd`` is quick and does not import Inductor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retrograd.version import VERSION

if TYPE_CHECKING:
    from retrograd.api import (
        CompiledAutograd,
        CompiledStep,
        compile,
        compile_step,
        compiled_autograd,
        disable,
        enable,
        explain,
        reset,
    )
    from retrograd.config import Config
    from retrograd.errors import (
        BackendError,
        CaptureError,
        ContextError,
        ExportError,
        FallbackWarning,
        LoadError,
        LoweringError,
        OptionError,
        RetrogradError,
        UnsupportedTorchError,
        VerificationError,
    )
    from retrograd.events import counters

__version__ = VERSION

_HOMES = {
    "retrograd.api": (
        "CompiledAutograd",
        "CompiledStep",
        "compile",
        "compile_step",
        "compiled_autograd",
        "disable",
        "enable",
        "explain",
        "reset",
    ),
    "retrograd.config": ("Config",),
    "retrograd.errors": (
        "BackendError",
        "CaptureError",
        "ContextError",
        "ExportError",
        "FallbackWarning",
        "LoadError",
        "LoweringError",
        "RetrogradError",
        "OptionError",
        "UnsupportedTorchError",
        "VerificationError",
    ),
    "retrograd.events": ("counters",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BackendError",
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
    "RetrogradError",
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
        return importlib.import_module("retrograd.aot")
    if name not in _HOME:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
