"""Fourth stage: a `Partition` becomes a callable with real autograd. Also runs all stages in one call.

`compile`. In: a `Partition` and a backend for each of its graphs. Out: a `Compiled`, called like the captured
function. It refuses inputs unlike the captured ones; ``aot.function`` captures again for those.

`run_stages`. In: a `CaptureState` and a `Config`. Out: a `CompiledFunction`, the core of a `Compiled`. The
report and the logs record what was captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from retrograd.aot.joint_capture import JointGraph, capture_divided
from retrograd.aot.modules import FlatCall
from retrograd.aot.partition_cache import KeptPartition, kept_partition
from retrograd.aot.partitioner import partition_for
from retrograd.aot.reinplacing import writing_ahead
from retrograd.aot.repeated import GraphCall, capture_graph
from retrograd.aot.run.call import CompiledFunction
from retrograd.aot.run.lowering import begin_in_processes
from retrograd.aot.run.recording import lower_half
from retrograd.aot.run.region import RegionCode
from retrograd.backends.base import Backend, GraphKind
from retrograd.backends.registry import find_backend
from retrograd.config import SWITCH, Config, check, checked
from retrograd.cudagraphs.graphed_call import SharedMemory, Values
from retrograd.errors import CallError, CodeFailedError, NotReadyError
from retrograd.events import AOT_LOGS
from retrograd.graph.joint_graph import CaptureOptions, CaptureState, Leaf, Partition, SavedKind
from retrograd.graph.lazy import LazyGraph
from retrograd.graph.structure import is_same
from retrograd.passes.aten import pass_named
from retrograd.policy import WORTH_PROCESSES
from retrograd.report import GraphReport, Report, process_report
from retrograd.runtime.profiler import artifact
from retrograd.runtime.pytree import tree_flatten
from retrograd.specialize.guard import guard_as_traced
from retrograd.trace import FirstRun, InputGuard


@checked(partition=(Partition, "what aot.partition returned"), lazy=SWITCH)
def compile(
    partition: Partition,
    forward: str | Callable[..., Any] = "inductor",
    backward: str | Callable[..., Any] | None = None,
    *,
    lazy: bool = True,
    cudagraphs: bool = False,
    regions: bool | int = True,
) -> Compiled:
    """Compile the forward and backward graphs.

    Args:
        partition: from ``partition``. It may be compiled several times, with different backends.
        forward, backward: a backend's name, or a callable ``(gm, example_inputs) -> callable``. The
            backward's default is the forward's backend.
        lazy: compile each region's backward when it first runs, for the actual strides of the saved tensors.
            If False, compile it now.
        cudagraphs: capture the code in CUDA graphs, and replay them where that is safe. What the forward
            saves stays in the graphs' memory. ``retrograd.explain()`` says why a call is not replayed.
        regions: compile repeated structure, such as the layers of a deep model, once if that pays off. A
            number is the fewest autograd nodes for which it does. User-written backends get complete graphs.

    Returns:
        A callable with the arguments and results of the captured function.

    Raises:
        OptionError: an option has an invalid value.
        Exception: a backend raised it.
    """
    find_backend(forward, "forward")
    config = Config(backend=forward, backward=backward, cudagraphs=cudagraphs, regions=regions)
    return Compiled(compile_with(partition, config, process_report, lazy))


def compile_with(
    partition: Partition, config: Config, report: Report, lazy: bool = True, keep: KeptPartition | None = None
) -> CompiledFunction:
    """`compile`, for a `config` that has been checked. `report` records what runs eagerly later. If `keep` is
    given, worker processes begin to compile the partition, and we write it to disk meanwhile."""
    ahead = find_backend(config.backend)
    behind = ahead if config.backward is None else find_backend(config.backward, "backward")
    # The backend may choose strides for saved tensors, unless the backward is compiled before we know them.
    saved = 0 if lazy else sum(saved.kind is SavedKind.INTERMEDIATE for saved in partition.saved)
    visible = partition.joint.signature.forward_count + saved
    half = GraphKind(is_inference=not partition.backwards, visible=visible)
    memory = SharedMemory()
    regions = [
        RegionCode(partition, number, behind, config, report, memory)
        for number in range(len(partition.backwards))
    ]
    if keep is not None:
        begin_in_processes(ahead, partition.ahead, partition.joint.state, half, config)
        for region in regions:
            region.begin_in_processes()
        keep.write(partition)
    # Results other than the function's own values may stay in the pool's memory.
    results = len(partition.ahead.summary.results)
    kept = {place: place for place in range(partition.joint.signature.forward_count, results)}
    values = Values(kept, memory=memory if partition.backwards else None)
    code = lower_half(ahead, partition.ahead, partition.joint.state, half, config, values)
    if not lazy:
        for region in regions:
            region.compile_ahead()
    return CompiledFunction(partition, code, regions)


class Compiled:
    """A compiled joint graph with real autograd.

    Attributes:
        code: the compiled code, for flat inputs that have been checked.
        partition: the partition that was compiled.
    """

    def __init__(self, code: CompiledFunction) -> None:
        self.code, self.partition = code, code.partition
        self._joint = code.partition.joint
        self._state: CaptureState = self._joint.state
        self._guard: InputGuard | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it like the captured function, with a module's current parameters and buffers.

        Raises:
            CallError: the arguments are unlike the captured ones.
        """
        call, flat = self._state.call, self._flattened(args, kwargs)
        return self.flat([*(call.state.current() if isinstance(call, FlatCall) else ()), *flat])

    def with_state(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Call it with parameters and buffers by name, such as ``module.state_dict(keep_vars=True)``. Tensors
        that required grad at capture must require it now.

        Raises:
            CallError: a name is missing, or inputs are unlike the captured ones.
        """
        check("state", state, (Mapping, "tensors by name, as mod.state_dict(keep_vars=True) gives them"))
        flat = self._flattened(args, kwargs)
        names = [leaf.name for leaf in self._state.leaves[: len(self._state.leaves) - len(flat)]]
        for name in names:
            if name not in state:
                raise self._error(name, f"{name} is not in the state", "give it by this name")
        return self.flat([*(state[name] for name in names), *flat])

    def _flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        flat, spec = tree_flatten((args, kwargs))
        known = self._state.in_spec
        if known is not None and spec != known:
            raise self._error("arguments", f"the arguments are {spec}, and were {known}", "give them as then")
        return flat

    def flat(self, leaves: Sequence[Any]) -> Any:
        """Call it with flat inputs: a module's parameters and buffers first, then the arguments.

        Raises:
            CallError: the inputs are unlike the captured ones.
        """
        if not isinstance(leaves, (list, tuple)):
            raise self._error(
                "inputs", f"expected a list of inputs, got {type(leaves).__name__}", _WITH_STATE
            )
        if len(leaves) != len(self._state.leaves):
            text = f"{len(self._state.leaves)} inputs were captured, and {len(leaves)} are given"
            raise self._error("inputs", text, _WITH_STATE)
        sources = [*leaves, *self._joint.found]
        if self._guard is None or not self._guard.check(sources):
            for leaf, value in zip(self._state.leaves, leaves, strict=True):
                if leaf.same_as is not None and value is not leaves[leaf.same_as]:
                    twins = f"{self._state.leaves[leaf.same_as].name} and {leaf.name}"
                    raise self._error(leaf.name, f"{twins} were one tensor at capture, and are two", _ANEW)
                for what in _differences(leaf, value, self._joint.offsets_matter):
                    raise self._error(leaf.name, f"{leaf.name} {what}", _ANEW)
            if self._guard is not None:
                raise self._error("inputs", self._guard.why_not(sources), _ANEW)
            self._guard = guard_as_traced(leaves, self._joint)
        try:
            return self.code(leaves)
        except (CodeFailedError, NotReadyError) as error:
            raise error.__cause__ or error from None

    def _error(self, role: str, text: str, way_out: str) -> CallError:
        name = self._state.name
        return CallError.because(
            "call", f"cannot call the compiled {name}: {text}", "aot.call", role, way_out=way_out
        )


_WITH_STATE = "call it like the function that was captured, or .flat([...]) with its state first"
_ANEW = "capture it for such inputs too, or use aot.function, which does"


def _differences(leaf: Leaf, value: Any, offsets_matter: bool) -> Iterator[str]:
    """How `value` differs from the captured input `leaf`, as texts for an error."""
    if not isinstance(leaf.value, torch.Tensor):
        if leaf.kind is None and not is_same(leaf.value, value):
            yield f"was {leaf.value!r} at capture, and is {value!r}"
        return
    if not isinstance(value, torch.Tensor):
        yield f"was a tensor at capture, and is {type(value).__name__}"
        return
    fake = leaf.value
    static = [size if type(size) is int else None for size in fake.shape]
    sizes_fit = value.dim() == len(static) and all(
        size is None or size == now for size, now in zip(static, value.shape, strict=True)
    )
    if not sizes_fit:
        yield f"had sizes {list(fake.shape)} at capture, and has {list(value.shape)}"
    for what in ("dtype", "device"):
        if getattr(value, what) != getattr(fake, what):
            yield f"had {what} {getattr(fake, what)} at capture, and has {getattr(value, what)}"
    if offsets_matter and value.storage_offset() != fake.storage_offset():
        begins = value.storage_offset()
        yield f"began at {fake.storage_offset()} in its memory at capture, and begins at {begins}"
    if value.requires_grad != leaf.requires_grad:
        yield f"{'required' if leaf.requires_grad else 'did not require'} grad at capture"


def run_stages(  # noqa: PLR0913 - all stages together need these
    state: CaptureState,
    config: Config,
    report: Report,
    *,
    split_at_leaf_grads: bool = False,
    lazy: bool = True,
    ended_by: str = "",
    graph: fx.GraphModule | None = None,
    first: FirstRun | None = None,
) -> CompiledFunction:
    """Capture, apply passes, partition and compile.

    Args:
        state: the function to capture.
        config: the user's options.
        report: records the graph, and what runs eagerly.
        split_at_leaf_grads: as in ``aot.capture``.
        lazy: as in ``aot.compile``.
        ended_by: as in `GraphReport`.
        graph: a graph from Dynamo, if `state` calls nothing else. We then cache the partition on disk.
        first: as in `capture_divided`.
    """
    backend = find_backend(config.backend)
    backend.prepare()
    kept = None if graph is None else kept_partition(state, graph, config)
    parts = None if kept is None else kept.read()
    is_known = parts is not None
    if parts is None:
        is_large = graph is not None and len(graph.graph.nodes) >= WORTH_PROCESSES
        backend.prepare(in_process=is_large and kept is not None)
        with report.compiling(f"capturing {state.name}"):
            joint = _captured(state, config, split_at_leaf_grads, first)
            whole = backend if config.backward is None else Backend()  # of both halves
            parts = partition_for(whole, joint, config.partitioner)
            parts = writing_ahead(parts) if backend.takes_writes else parts
    with report.compiling(f"compiling {state.name}"):
        code = compile_with(parts, config, report, lazy, None if is_known else kept)
    report.compiled(_described(parts, ended_by))
    _log(parts, is_known)
    return code


def _log(partition: Partition, is_known: bool) -> None:
    """Write the graphs into the log and into torch's structured trace. The trace leaves out a partition that
    was read from a file: its graphs would have to be decoded, or captured again, for that."""
    joint: Any = partition.joint
    if AOT_LOGS["graph"].isEnabledFor(logging.DEBUG):
        AOT_LOGS["graph"].debug("%s\n%s", joint.state.name, joint.print_readable())
    if is_known:
        return
    artifact("retrograd_joint_graph", joint.print_readable)
    halves = ["forward", *(f"backward_{number}" for number in range(len(partition.backwards)))]
    for name, graph in zip(halves, partition.graphs, strict=True):
        artifact(f"retrograd_{name}_graph", partial(_readable, graph))


def _readable(graph: LazyGraph) -> str:
    return graph.gm.print_readable(print_output=False)


def _captured(
    state: CaptureState, config: Config, split_at_leaf_grads: bool, first: FirstRun | None
) -> JointGraph:
    is_exact = not find_backend(config.backend).traces
    manner = CaptureOptions(config.single_region, split_at_leaf_grads, separate_sums=is_exact)
    if isinstance(state.call, GraphCall):
        joint, _ = capture_graph(state, manner)
    else:
        joint, _ = capture_divided(state, manner, first)
    return joint.apply(*config.passes) if config.passes else joint


def _described(partition: Partition, ended_by: str) -> GraphReport:
    backwards = [backward.graph.summary.calls for backward in partition.backwards]
    forward, name = partition.ahead.summary.calls, partition.joint.state.name
    return GraphReport(name, forward, sum(backwards), len(backwards), partition.saved_bytes, ended_by)


def find_named(config: Config) -> None:
    """Check that the backends and passes that `config` names exist.

    Raises:
        OptionError: a backend or pass does not exist.
    """
    find_backend(config.backend)
    if config.backward is not None:
        find_backend(config.backward, "backward")
    for one in config.passes:
        if isinstance(one, str):
            pass_named(one)
