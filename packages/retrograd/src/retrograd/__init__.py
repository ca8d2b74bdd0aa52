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
    from retrograd.api import CompiledAutograd as CompiledAutograd
    from retrograd.api import compile as compile
    from retrograd.api import compiled_autograd as compiled_autograd
    from retrograd.api import disable as disable
    from retrograd.api import enable as enable
    from retrograd.api import explain as explain
    from retrograd.api import reset as reset
    from retrograd.config import Config as Config
    from retrograd.dynamo import CompiledStep as CompiledStep
    from retrograd.dynamo import compile_step as compile_step
    from retrograd.errors import BackendError as BackendError
    from retrograd.errors import CallError as CallError
    from retrograd.errors import CaptureError as CaptureError
    from retrograd.errors import ContextError as ContextError
    from retrograd.errors import ExportError as ExportError
    from retrograd.errors import FallbackWarning as FallbackWarning
    from retrograd.errors import InputsChangedError as InputsChangedError
    from retrograd.errors import LoadError as LoadError
    from retrograd.errors import LoweringError as LoweringError
    from retrograd.errors import OptionError as OptionError
    from retrograd.errors import PassError as PassError
    from retrograd.errors import RetrogradError as RetrogradError
    from retrograd.errors import UnlikeTracedError as UnlikeTracedError
    from retrograd.errors import UnsupportedTorchError as UnsupportedTorchError
    from retrograd.errors import VerificationError as VerificationError
    from retrograd.events import counters as counters

__version__ = VERSION

#: The public names, each with the module that defines it.
_HOMES = {
    **dict.fromkeys(
        [
            "CompiledAutograd",
            "compile",
            "compiled_autograd",
            "disable",
            "enable",
            "explain",
            "reset",
        ],
        "retrograd.api",
    ),
    **dict.fromkeys(["CompiledStep", "compile_step"], "retrograd.dynamo"),
    **dict.fromkeys(
        [
            "BackendError",
            "CallError",
            "CaptureError",
            "ContextError",
            "ExportError",
            "FallbackWarning",
            "InputsChangedError",
            "LoadError",
            "LoweringError",
            "OptionError",
            "PassError",
            "RetrogradError",
            "UnlikeTracedError",
            "UnsupportedTorchError",
            "VerificationError",
        ],
        "retrograd.errors",
    ),
    "Config": "retrograd.config",
    "counters": "retrograd.events",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name == "aot":
        return _imported("retrograd.aot")
    if name not in _HOMES:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}")
    return getattr(_imported(_HOMES[name]), name)


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
    return sorted([*_HOMES, "__version__"])
