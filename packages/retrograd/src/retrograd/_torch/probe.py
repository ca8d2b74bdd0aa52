"""Is the installed torch one whose private engine protocol we know?

In: the imported torch. Out: nothing, or one `UnsupportedTorchError` that names what is missing.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import torch

from retrograd.errors import UnsupportedTorchError

OLDEST, NEWEST = (2, 11), (2, 13)

#: module -> names that the package uses from it; found in 2.11, 2.12 and 2.13.
REQUIRED: dict[str, tuple[str, ...]] = {
    "torch._C._dynamo.compiled_autograd": (
        "set_autograd_compiler",
        "clear_cache",
        "call_cpp_tensor_pre_hooks",
    ),
    "torch._C": (
        "_current_graph_task_id",
        "_current_autograd_node",
        "_will_engine_execute_node",
        "_get_dispatch_mode",
        "_is_any_autocast_enabled",
        "_DisableAutocast",
    ),
    "torch._functorch._aot_autograd.subclass_utils": ("wrap_tensor_subclasses",),
    "torch._dynamo.output_graph": ("OutputGraph",),
    "torch.autograd.function": ("FunctionMeta",),
    "torch._dynamo.compiled_autograd": ("ops", "compiled_autograd_enabled"),
    "torch._dynamo.eval_frame": ("_stance",),
    "torch.autograd.graph": ("_engine_run_backward",),
    "torch.autograd": ("_engine_run_backward",),
    "torch.fx.graph": ("_BoxedCodeGen", "_Namespace", "_FindNodesLookupTable"),
    "torch._C._dynamo.guards": ("TensorGuards",),
}


def torch_release(version: str | None = None) -> tuple[int, int]:
    """The (major, minor) release of `version`, by default of the imported torch."""
    found = re.match(r"(\d+)\.(\d+)", version or torch.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def missing_names() -> tuple[str, ...]:
    """The private names that this torch does not have, fully qualified."""
    missing: list[str] = []
    for module_name, names in REQUIRED.items():
        module = _find(module_name)
        if module is None:
            missing.append(module_name)
        else:
            missing += [f"{module_name}.{name}" for name in names if not hasattr(module, name)]
    return tuple(missing)


def _find(module_name: str) -> Any:
    """A module, also one inside the C extension, which the import system does not know."""
    try:
        return importlib.import_module(module_name)
    except ImportError:
        parent, _, name = module_name.rpartition(".")
        return getattr(_find(parent), name, None) if parent else None


@functools.cache
def check_supported() -> None:
    """Raise `UnsupportedTorchError` unless this torch offers the protocol. Runs once per process.

    Raises:
        UnsupportedTorchError: the release is outside 2.11 to 2.13, or a private name is missing.
    """
    missing = missing_names()
    if missing or not OLDEST <= torch_release() <= NEWEST:
        raise UnsupportedTorchError(torch.__version__, missing)
