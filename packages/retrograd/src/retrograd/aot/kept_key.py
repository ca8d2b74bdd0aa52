"""What a partition depends on, as a text that is the same in each process.

In: a `CaptureState`, the graph from Dynamo that it calls, and the choices. Out: a hash of all that a capture
and a cut depend on: the graph, its inputs, modes, options, decompositions, this package's sources, and what
Inductor's own cache depends on. A graph that this cannot name (functions that are not torch's, tensors that
the graph holds, symbolic sizes, the user's passes, modes and hooks) is refused.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import is_operator_overload
from retrograd._torch.inductor import environment, patched
from retrograd._torch.trace import is_fake
from retrograd.backends.registry import InductorBackend, find_backend
from retrograd.config import Config
from retrograd.errors import Refusal
from retrograd.graph.joint_graph import CaptureState


def key_of(state: CaptureState, gm: fx.GraphModule, config: Config) -> str:
    """The hash.

    Raises:
        Refusal: something has no name.
        Exception: whatever Inductor says against keeping something.
    """
    return hashlib.sha256("\n".join(_said(state, gm, config)).encode()).hexdigest()


def _said(state: CaptureState, gm: fx.GraphModule, config: Config) -> Iterator[str]:
    backend = find_backend(config.backend)
    if type(backend) is not InductorBackend or config.passes or not isinstance(config.partitioner, str):
        raise Refusal("choices", "a backend, a partitioner or passes of the user's")
    if state.is_symbolic or state.aliases or gm.graph.find_nodes(op="get_attr"):
        raise Refusal("state", "symbolic sizes, inputs that share memory, or tensors that the graph holds")
    with patched(backend.settings):
        yield _plain([*environment(), backend.settings, _table(state.decompositions)])
    yield f"{_package()} {config.single_region} {config.partitioner} {state.name} {state.thread_modes}"
    for leaf in state.leaves:
        yield _plain(
            [leaf.name, leaf.kind and leaf.kind.value, leaf.requires_grad, leaf.is_leaf, leaf.same_as]
        )
        yield _described(leaf.value)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function", "call_method", "output"):
            raise Refusal("node", f"a node of kind {node.op}")
        marks = {key: node.meta.get(key) for key in ("stack_trace", "recompute", "ac_graph_id", "custom")}
        target = _function(node.target) if node.op == "call_function" else str(node.target)
        yield _plain([node.op, node.name, target, node.args, node.kwargs, marks])
        yield type(node.meta.get("example_value")).__qualname__


def _described(value: Any) -> str:
    """A leaf of a state, as far as a capture depends on it."""
    if not isinstance(value, torch.Tensor):
        return _plain(value)
    if not is_fake(value):
        raise Refusal("input", f"a {type(value).__name__}")
    kind = [type(value).__qualname__, isinstance(value, torch.nn.Parameter), value._is_view()]
    return _plain([*kind, *strided_layout(value)])


def strided_layout(value: torch.Tensor) -> list[Any]:
    """How a tensor lies in memory."""
    sizes = [
        list(value.shape),
        list(value.stride()),
        value.storage_offset(),
        value.untyped_storage().nbytes(),
    ]
    return [value.layout, value.dtype, value.device, *sizes]


def _table(decompositions: Any) -> list[str]:
    return sorted(f"{op} {_python_name(fn)}" for op, fn in decompositions.items())


def _python_name(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        given = [_python_name(one) if callable(one) else one for one in (*fn.args, *fn.keywords.values())]
        return f"{_python_name(fn.func)}{_plain([list(fn.keywords), given])}"
    return f"{fn.__module__}.{getattr(fn, '__qualname__', fn)}"


#: values whose text says all about them.
_SAID = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _plain(value: Any) -> str:
    """A text that says all about `value`, the same in each process.

    Raises:
        Refusal: there is none.
    """
    if value is None or value is ... or type(value) in _SAID:
        return repr(value)
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_plain, value))})"
    if isinstance(value, slice):
        return f"slice{_plain([value.start, value.stop, value.step])}"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_plain(key)}: {_plain(one)}' for key, one in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_plain, value)))}}}"
    raise Refusal("unwritable", f"a {type(value).__name__}")


_OF_TORCH = ("torch", "_operator", "math")


def _function(target: Any) -> str:
    """The name of a function that is torch's own or Python's.

    Raises:
        Refusal: it is another one, or stands for one.
    """
    if is_operator_overload(target):
        name = str(target)
        if name.startswith(("aten.", "prims.")):
            return name
    elif isinstance(target, BuiltinFunctionType) or type(target).__name__ == "method_descriptor":
        owner = getattr(target, "__self__", None)
        module = target.__module__ or getattr(owner, "__module__", "") or ""
        if module.split(".")[0] in _OF_TORCH:
            return f"{module}.{getattr(owner, '__qualname__', '')}.{target.__qualname__}"
    elif isinstance(target, FunctionType):
        folder = os.path.join(os.path.dirname(torch.__file__), "")
        if target.__module__.split(".")[0] == "torch" and target.__code__.co_filename.startswith(folder):
            return f"{target.__module__}.{target.__qualname__}"
    raise Refusal("function", f"{getattr(target, '__name__', target)} is not torch's")


@functools.cache
def _package() -> str:
    """A hash of this package's sources."""
    found = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)}\0".encode())
        found.update(file.read_bytes())
    return found.hexdigest()
