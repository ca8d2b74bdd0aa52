"""Trace Python into an FX graph of ATen calls. All tracing in this package goes through this file.

`make_graph`: In: a body that creates the graph's inputs with a `GraphTracer` and returns its outputs. Out:
the graph.

`trace`: In: a segment as a boxed function, its arguments, and which sizes are symbolic. Out: a `Traced` graph
without mutations, its fake inputs, and the shape environment with the guards that tracing added.

We use ``make_fx`` without its process-wide effects. Its own tracer replaces ``nn.Module.__call__`` and
``__getattr__``, and sets a flag that makes compiled functions raise on other threads. One process-wide global
remains, which higher-order operators read, so only one thread traces at a time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import (
    _MakefxTracer,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from retrograd.errors import Refusal
from retrograd.facts import fact
from retrograd.graph.emit import Boxed
from retrograd.graph.fx import has_effect, is_mutating, is_random, lazily, real_tensors
from retrograd.graph.operator_effects import refuse_asynchronous
from retrograd.process import ThreadValue, tracing
from retrograd.runtime.modes import autocast_off, generator_states, restore_generator_states, seeds_and_states
from retrograd.trace.fakes import fake_of, is_fake, new_fake_mode, symbolic_integer, why_not_fakeable
from retrograd.trace.layouts import laid_out_as_real

Decompositions = Mapping[Any, Callable[..., Any]]

#: Inside, on this thread, torch uses its Python implementations of operators where they exist.
python_forms: Callable[[], AbstractContextManager[Any]] = enable_python_dispatcher


class GraphTracer:
    """Given to the body of a trace. Every new node gets the entries of `note` in its metadata. `tracer` is
    torch's own; `draws` counts the random calls of the forward so far."""

    draws = 0

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self._create_node = tracer.create_node
        self.note: dict[str, Any] = {}
        tracer.create_node = self._created

    def placeholder(self, name: str, value: Any) -> Any:
        """Add `value` (a fake tensor or a symbolic integer) as an input of the graph."""
        proxy = self.tracer.create_proxy("placeholder", name, (), {})
        proxy.node.meta["val"] = value
        track_tensor_tree(value, proxy, constant=None, tracer=self.tracer)
        return value

    @contextmanager
    def noting(self, **note: Any) -> Iterator[None]:
        """Inside, every new node gets these entries in its metadata."""
        before = self.note
        self.note = {**before, **note}
        try:
            yield
        finally:
            self.note = before

    @property
    def graph(self) -> fx.Graph:
        """The graph so far."""
        found: fx.Graph = self.tracer.graph
        return found

    def node_of(self, value: torch.Tensor) -> fx.Node | None:
        """The node that computes a plain tensor of this trace; None if there is none."""
        known = get_proxy_slot(value, self.tracer, None)
        return None if known is None else known.proxy.node

    def close(self) -> None:
        """Called after the body has ended."""

    def _created(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = self._create_node(kind, *args, **kwargs)
        if kind == "call_function":
            self._annotate(node)
        return node

    def _annotate(self, node: fx.Node) -> None:
        """Add metadata to a new call. Inductor names kernels by ``original_aten``."""
        refuse_asynchronous((node.target, *node.args[:2]))
        if isinstance(node.target, torch._ops.OpOverload):
            node.meta.setdefault("original_aten", node.target)
        node.meta.update(self.note)


class JointTracer(GraphTracer):
    """Traces a function and its backward. Each forward call records its sequence number and source line."""

    def __init__(self, tracer: Any) -> None:
        super().__init__(tracer)
        self._generators = seeds_and_states()
        with real_tensors():
            self._states = generator_states()
        self._is_over = False

    def _annotate(self, node: fx.Node) -> None:
        is_backward = "is_backward" in self.note
        if is_random(node) and not is_backward:
            self.refuse_other_numbers()
            self._move_generators()
        super()._annotate(node)
        if is_backward:
            return
        node.meta.setdefault("seq_nr", torch._C._autograd._get_sequence_nr() - 1)
        if "stack_trace" not in node.meta and (line := _users_line()):
            node.meta["stack_trace"] = line

    def inputs_with_kept_cast(self) -> set[str]:
        """Names of the inputs so far of which one cast is read more than once, as if autocast had cached
        it."""
        placeholders = self.graph.find_nodes(op="placeholder")
        return {
            node.target
            for node in placeholders
            for user in node.users
            if fact("cast", user.target) and len(user.users) > 1
        }

    def refuse_other_numbers(self) -> None:
        """Check that the random number generators are where the traced draws left them.

        Raises:
            Refusal: they are not, so the function has set their state.
        """
        if seeds_and_states() != self._generators:
            raise Refusal("reseeded", "it sets the state of a generator of random numbers")

    def _move_generators(self) -> None:
        """Move the generator, as a real draw would.

        Fake tensors draw nothing. Without this, we could not tell if the function restores an earlier state.
        """
        self.draws += 1
        torch.default_generator.manual_seed(self.draws)
        self._generators = seeds_and_states()

    def close(self) -> None:
        """Restore the generators. This also undoes the draws of operators without a fake kernel."""
        if not self._is_over and any(map(is_random, self.graph.nodes)):
            with real_tensors():
                restore_generator_states(self._states)

    @contextmanager
    def generators_given_back(self) -> Iterator[None]:
        """Inside, the generators have the state from before the trace, so that replayed calls draw for real.

        Afterwards this tracer no longer moves them. A state that the function itself has set is kept.
        """
        has_set_them = seeds_and_states() != self._generators
        with real_tensors():
            now = generator_states()
            restore_generator_states(self._states)
        yield
        if has_set_them:
            with real_tensors():
                restore_generator_states(now)
        self._is_over = True


_current: ThreadValue[GraphTracer | None] = ThreadValue(None)


def tracer_here() -> GraphTracer | None:
    """The tracer that is active on this thread; None if there is none."""
    return _current.get()


def make_graph(
    body: Callable[[Any], Sequence[Any]],
    decompositions: Decompositions,
    kind: Callable[[Any], GraphTracer] = GraphTracer,
    uses_python_forms: bool = True,
) -> fx.GraphModule:
    """Trace `body` into a graph.

    Args:
        body: called with the tracer, on this thread; returns the graph's outputs.
        decompositions: by operator, as for ``make_fx``.
        kind: the class of the tracer.
        uses_python_forms: whether `python_forms` is active. Symbolic sizes need it; results may differ in the
            last bit.

    Returns:
        A module whose placeholders come first. After its last change to the graph, the caller must recompile
            it.
    """

    def traced() -> tuple[Any, ...]:
        mode = get_proxy_mode()
        assert mode is not None
        tracer = kind(mode.tracer)
        with _current.switched(tracer):
            try:
                return tuple(body(tracer))
            finally:
                tracer.close()

    dispatcher = python_forms() if uses_python_forms else nullcontext()
    table = laid_out_as_real(decompositions)
    with tracing, dispatcher, _without_users_hooks(), lazily():
        gm = _GraphMaker(table, "real", False, False, False, False, True).trace(traced)
    _placeholders_first(gm.graph)
    return gm


class _GraphMaker(_MakefxTracer):
    """``make_fx``, with a tracer that patches nothing."""

    def _construct_modes_with_fx_tracer(self, fx_tracer: Any) -> None:
        fx_tracer.trace = partial(_trace, fx_tracer)
        super()._construct_modes_with_fx_tracer(fx_tracer)
        self.torch_fn_metadata_mode = nullcontext()  # nobody reads its metadata


def _trace(tracer: Any, root: Callable[[], Any], concrete_args: Any = None) -> fx.Graph:
    """``fx.Tracer.trace`` for a function without arguments, without its patches."""
    tracer.root = torch.nn.Module()
    tracer.tensor_attrs = {}
    tracer.graph = fx.Graph(tracer_cls=type(tracer))
    tracer.create_node("output", "output", (tracer.create_arg(root()),), {})
    graph: fx.Graph = tracer.graph
    return graph


def recorded(**note: Any) -> AbstractContextManager[None]:
    """Inside, on this thread, every traced node gets these entries in its metadata."""
    tracer = _current.get()
    return nullcontext() if tracer is None else tracer.noting(**note)


def _without_users_hooks() -> AbstractContextManager[Any]:
    """Inside, the user's saved-tensor hooks do not see the graphs that we build."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


# While a thread traces, torch does not log operators that fail on fake tensors: we turn the error into a
# reason.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: _current.get() is None)


def _placeholders_first(graph: fx.Graph) -> None:
    anchor = next(iter(graph.nodes))
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        if node is anchor:
            anchor = anchor.next
        else:
            anchor.prepend(node)


_TORCH = tuple(path + "/" for path in torch.__path__)
_OURS = __file__.rsplit("/trace/", 1)[0] + "/"


def _users_line() -> str:
    """The innermost line that is neither in torch nor in this package, as a stack trace of one entry."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, *_TORCH, "<")):
            return f'  File "{name}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@dataclass(frozen=True)
class Traced:
    """A traced segment.

    Attributes:
        gm: the functional ATen graph. It returns a tuple of the outputs that are not None.
        example_inputs: fake tensors and symbolic integers, one per entry of `fed`.
        fed: positions of the arguments that the graph takes.
        given: for each output of the segment, its position in the graph's result; None for an output that is
            None.
        shape_env: holds the guards; None if every size is static.
    """

    gm: fx.GraphModule
    example_inputs: tuple[Any, ...]
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    shape_env: ShapeEnv | None


def trace(
    fn: Boxed,
    args: Sequence[Any],
    symbolic: Mapping[int, frozenset[int]] | None,
    decompositions: Decompositions,
) -> Traced:
    """Trace `fn`.

    Args:
        fn: runs the segment on a list of values.
        args: the values; None for undefined gradients.
        symbolic: for each argument, which dimensions are symbolic (dimension 0 of an int is its value); None
            to make every size static.
        decompositions: applied during tracing.
    """
    if reason := next(filter(None, map(_why_not_traceable, args)), None):
        raise Refusal("not-traceable", reason)
    mode = new_fake_mode(symbolic is not None)
    fakes = _fakes(mode, args, symbolic or {})
    fed = tuple(i for i, fake in enumerate(fakes) if isinstance(fake, (torch.Tensor, torch.SymInt)))
    given: list[int | None] = []

    def flat(*inputs: Any) -> tuple[Any, ...]:
        values = dict(zip(fed, inputs, strict=True))
        results = fn([values.get(i, value) for i, value in enumerate(args)])
        present = [result for result in results if result is not None]
        count = iter(range(len(present)))
        given[:] = [None if result is None else next(count) for result in results]
        return tuple(present)

    example_inputs = tuple(fakes[i] for i in fed)
    # What a decomposition creates must be fake if its sizes are symbolic. The mode is not entered otherwise:
    # where torch enters it again, an interrupt between two instructions ends the process.
    with mode if symbolic is not None else nullcontext():
        gm = _functional_graph(flat, example_inputs, decompositions)
    return Traced(gm, example_inputs, fed, tuple(given), mode.shape_env)


def decomposed(
    gm: fx.GraphModule, inputs: Sequence[Any], fake_mode: FakeTensorMode, table: Decompositions
) -> fx.GraphModule:
    """Trace `gm` again with decompositions."""
    with torch.no_grad(), autocast_off(), fake_mode:
        return _graph(gm, inputs, table)


def _why_not_traceable(value: Any) -> str | None:
    """Why a segment with this argument is interpreted; None if it can be traced."""
    if isinstance(value, torch.Tensor):
        return "tensor subclass FakeTensor" if is_fake(value) else why_not_fakeable(value)
    return None if value is None or isinstance(value, (int, float)) else f"{type(value).__name__} argument"


def _functional_graph(
    fn: Callable[..., Any], inputs: Sequence[Any], decompositions: Decompositions
) -> fx.GraphModule:
    """Trace `fn`. If the graph mutates, functionalise the graph and trace it again.

    We do not functionalise `fn` itself: functionalisation would hide which arguments require grad, and would
    meet tensor subclasses.
    """
    gm = _graph(fn, inputs, decompositions)
    if any(map(is_mutating, gm.graph.nodes)):
        with torch.no_grad():
            mutating = gm
            functional = torch.func.functionalize(lambda *args: mutating(*args), remove="mutations")
            gm = _graph(functional, inputs, decompositions)
    if left := next(filter(is_mutating, gm.graph.nodes), None):
        raise Refusal("not-traceable", f"{left.target} changes one of the segment's inputs in place")
    return gm


def _graph(fn: Callable[..., Any], inputs: Sequence[Any], decompositions: Decompositions) -> fx.GraphModule:
    def body(tracer: Any) -> Sequence[Any]:
        for i, value in enumerate(inputs):
            tracer.placeholder(f"arg{i}_1", value)
        results: Sequence[Any] = fn(*inputs)
        return results

    gm = make_graph(body, decompositions)
    gm.graph.eliminate_dead_code(lambda node: bool(node.is_impure()) or has_effect(node))
    gm.recompile()
    return gm


def _fakes(mode: FakeTensorMode, values: Sequence[Any], symbolic: Mapping[int, frozenset[int]]) -> list[Any]:
    """One fake per value. A tensor that occurs twice gets one fake. None and static numbers are unchanged."""
    seen: dict[int, Any] = {}

    def fake(index: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                made = fake_of(mode, value, f"t{index}", symbolic.get(index, ()))
                # Some backward formulas ask which saved tensors require grad (linalg.solve, for the gradients
                # it computes).
                seen[id(value)] = made.requires_grad_(value.requires_grad)
            return seen[id(value)]
        if type(value) is int and symbolic.get(index):
            return symbolic_integer(mode, value, f"t{index}")
        return value

    return [fake(index, value) for index, value in enumerate(values)]
