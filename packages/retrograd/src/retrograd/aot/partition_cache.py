"""On-disk cache of partitions: another process, or an equal layer, need not trace and partition them again.

In: a `CaptureState`, the graph from Dynamo that it calls, and the config. Out: the `Partition` that an
earlier process made for the same key, or None; a file for the next process.

`partition_file` defines the file format. Reading a file executes nothing from it. Files are next to
Inductor's, and whatever disables Inductor's cache disables this one too. We write to a temporary name first,
so that no process reads a partial file. Unserialisable graphs are not cached. A file that does not decode to
the same graph is ignored.

The file name is a hash of everything that capture, partition and division depend on: the graph, its inputs,
modes, options, decompositions, this package's sources, and the key of Inductor's own cache. Names of nodes
and inputs do not count: the equal layers of a model have the same file. We refuse a graph that we cannot
hash: one with functions that are not torch's, tensors held by the graph, symbolic sizes or numbers, or the
user's passes, modes or hooks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx

from retrograd.aot.partition_file import name_graphs, read_partition, serialize_partition
from retrograd.backends import processes
from retrograd.backends.inductor import cache_folder, environment, patched, replacing
from retrograd.backends.registry import InductorBackend, find_backend
from retrograd.config import Config
from retrograd.errors import Refusal, first_line
from retrograd.events import AOT_LOGS, counters
from retrograd.graph.fx import is_operator_overload, is_symbolic
from retrograd.graph.joint_graph import CaptureState, Partition
from retrograd.policy import DEEP
from retrograd.runtime.pytree import tree_leaves
from retrograd.serialize import Writer

_log = AOT_LOGS["cache"]


@dataclass(frozen=True)
class KeptPartition:
    """The cache entry of one partition, which may not exist yet.

    Attributes:
        state: the state that is captured.
        config: the user's options.
        file: the path of the entry.
    """

    state: CaptureState
    config: Config
    file: Path

    def read(self) -> Partition | None:
        """The partition that an earlier process wrote. None if there is no file, or it cannot be read."""
        try:
            data, config = self.file.read_bytes(), self.config
            found = read_partition(data, self.state, config.partitioner, config.single_region)
        except FileNotFoundError:
            counters["kept_partition_misses"] += 1
            return None
        except Exception as error:  # damaged, of another format, or with operators that are not registered
            _log.info("%s is not used: %s", self.file, first_line(error))
            counters["kept_partition_misses"] += 1
            return None
        counters["kept_partition_hits"] += 1
        name_graphs(found, data)
        return found

    def write(self, made: Partition) -> None:
        """Write `made` and the division of each of its graphs to disk, if they can be serialised."""
        try:
            data = serialize_partition(made)
            with replacing(self.file) as to:
                to.write(data)
            name_graphs(made, data)
        except Exception as error:
            counters["kept_partition_refusals"] += 1
            _log.info("%s is not kept on disk: %s", self.state.name, first_line(error))


def kept_partition(state: CaptureState, gm: fx.GraphModule, config: Config) -> KeptPartition | None:
    """The cache entry for the partition of `state`; None if we cannot compute its key.

    Args:
        state: a state that calls `gm`. Symbolic sizes give no key.
        gm: the graph from Dynamo.
        config: the user's options.
    """
    try:
        name = hashlib.sha256(json.dumps(_depends_on(state, gm, config)).encode()).hexdigest()
        return KeptPartition(state, config, Path(cache_folder(), "retrograd", name[:2], f"{name}.json"))
    except Exception as error:
        counters["kept_partition_refusals"] += 1
        _log.info("%s is not looked up on disk: %s", state.name, first_line(error))
        return None


def expect(module: torch.nn.Module) -> None:
    """Announce that `module` will be compiled. If it is deep and no partition is cached yet, we start the
    worker processes now."""
    try:
        is_new = not Path(cache_folder(), "retrograd").exists()
    except Refusal:
        return
    if is_new and sum(1 for _ in module.modules()) >= DEEP:
        processes.boot()


# the key of a partition


class _NumberingWriter(Writer):
    """Writes the nodes of a graph by their number instead of their name."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self._numbers = {node: number for number, node in enumerate(graph.nodes)}

    def write(self, value: Any) -> Any:
        return {"node": self._numbers[value]} if isinstance(value, fx.Node) else super().write(value)


def _depends_on(state: CaptureState, gm: fx.GraphModule, config: Config) -> Any:
    """Everything that a partition depends on, as plain data that is the same in each process.

    Raises:
        Refusal: something cannot be part of a key.
        Exception: Inductor refuses to cache something.
    """
    backend = find_backend(config.backend)
    own = isinstance(config.partitioner, str) and isinstance(config.backward, str | None)
    if type(backend) is not InductorBackend or config.passes or not own:
        raise Refusal("choices", "a backend, a partitioner or passes of the user's")
    if state.is_symbolic or state.aliases or gm.graph.find_nodes(op="get_attr"):
        raise Refusal("state", "symbolic sizes, inputs that share memory, or tensors that the graph holds")
    writer = _NumberingWriter(gm.graph)
    with patched(backend.settings):
        found: list[Any] = [_package(), environment(), backend.settings]
    found += [config.single_region, config.partitioner, config.backward]
    found += [config.smallest_repeat, config.fewest_copies, state.name, str(state.thread_modes)]
    found += [
        [str(op), _python_name(fn)]
        for op, fn in sorted(state.decompositions.items(), key=lambda pair: str(pair[0]))
    ]
    for leaf in state.leaves:
        is_view = isinstance(leaf.value, torch.Tensor) and leaf.value._is_view()
        unnamed = replace(leaf, name="")
        found.append([unnamed, isinstance(leaf.value, torch.nn.Parameter), is_view])
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function", "call_method", "output"):
            raise Refusal("node", f"a node of kind {node.op}")
        marks = [node.meta.get(key) for key in ("stack_trace", "recompute", "ac_graph_id", "custom")]
        target = _function(node.target) if node.op == "call_function" else str(node.target)
        target = "" if node.op == "placeholder" else target
        value = node.meta.get("example_value")
        if any(map(_is_unknown, tree_leaves(value))):
            raise Refusal("number", "a number that differs from call to call; a capture may hold for one")
        kind = type(value).__qualname__
        found.append([node.op, target, node.args, node.kwargs, marks, kind])
    return writer.document(writer.write(found))


def _is_unknown(value: Any) -> bool:
    """Whether the value is a symbolic number, or a tensor with a symbolic size. A symbolic number counts even
    after Dynamo has specialised it, because the graph is the same for other values of it."""
    return isinstance(value, _SYMBOLIC) or (isinstance(value, torch.Tensor) and is_symbolic(value))


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _python_name(fn: Any) -> Any:
    if isinstance(fn, functools.partial):
        given = [_python_name(one) if callable(one) else one for one in (*fn.args, *fn.keywords.values())]
        return [_python_name(fn.func), [*fn.keywords], given]
    return f"{fn.__module__}.{getattr(fn, '__qualname__', fn)}"


_OF_TORCH = ("torch", "_operator", "math")


def _function(target: Any) -> str:
    """The name of a function that torch or Python defines.

    Raises:
        Refusal: something else defines the function, or it may wrap such a function.
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
