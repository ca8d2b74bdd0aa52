"""Trace what Python does into an FX graph of ATen calls: the one way in which this package traces.

In: a body that is given a `GraphTracer`, makes the graph's inputs with it, and returns values. Out: the
graph.

This is ``make_fx`` without what it does to the whole process while it runs: its tracer replaces
``nn.Module.__call__`` and ``__getattr__`` for every thread, and sets a flag that makes other threads'
compiled functions raise. What is left of the kind is one global of torch's, which the operators of higher
order read, and that is why one thread traces at a time.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import _MakefxTracer, get_proxy_mode, track_tensor_tree

from retrograd._torch.fx import is_random, lazily
from retrograd._torch.state import real_tensors, seeds_and_states
from retrograd.errors import Refusal
from retrograd.process import tracing

Decompositions = Mapping[Any, Callable[..., Any]]


class GraphTracer:
    """What the body of a trace works with; every node carries the entries of `note` in its metadata."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._create_node = tracer.create_node
        self.note: dict[str, Any] = {}
        tracer.create_node = self._created

    def placeholder(self, name: str, value: Any) -> Any:
        """`value` (a fake tensor or a symbolic integer) as a new input of the graph."""
        proxy = self._tracer.create_proxy("placeholder", name, (), {})
        proxy.node.meta["val"] = value
        track_tensor_tree(value, proxy, constant=None, tracer=self._tracer)
        return value

    @contextmanager
    def noting(self, **note: Any) -> Iterator[None]:
        """Every node made inside carries these entries in its metadata."""
        before = self.note
        self.note = {**before, **note}
        try:
            yield
        finally:
            self.note = before

    def close(self) -> None:
        """The body has ended."""

    def _created(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = self._create_node(kind, *args, **kwargs)
        if kind == "call_function":
            self._annotate(node)
        return node

    def _annotate(self, node: fx.Node) -> None:
        """Write into a new call what is to be known of it. Inductor names kernels by ``original_aten``."""
        if isinstance(node.target, torch._ops.OpOverload):
            node.meta.setdefault("original_aten", node.target)
        node.meta.update(self.note)


class JointTracer(GraphTracer):
    """The same for a function and its backward: each call of the forward knows its sequence number and its
    line."""

    def __init__(self, tracer: Any) -> None:
        super().__init__(tracer)
        self._generators = seeds_and_states()
        with real_tensors():
            self._state = torch.random.get_rng_state()
        self.draws = 0

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
        """Names of the inputs so far of which a cast is read more than once, as one that autocast kept."""
        placeholders = self._tracer.graph.find_nodes(op="placeholder")
        return {
            node.target
            for node in placeholders
            for user in node.users
            if user.target is torch.ops.aten._to_copy.default and len(user.users) > 1
        }

    def refuse_other_numbers(self) -> None:
        """If a generator is not where the draws so far have moved it, the function has set it.

        Raises:
            Refusal: it is elsewhere.
        """
        if seeds_and_states() != self._generators:
            raise Refusal("reseeded", "it sets the state of a generator of random numbers")

    def _move_generators(self) -> None:
        """Move the generator, as a draw would. Fake tensors draw nothing, so that a function which puts the
        state back afterwards would leave no trace."""
        self.draws += 1
        torch.default_generator.manual_seed(self.draws)
        self._generators = seeds_and_states()

    def close(self) -> None:
        """Undo all moves of generators."""
        if self.draws:
            with real_tensors():
                torch.random.set_rng_state(self._state)


def draws_so_far() -> int:
    """How many calls that draw random numbers this thread has traced into the graph that it makes."""
    return getattr(_current.tracer, "draws", 0)


class _Current(threading.local):
    """The trace that this thread is in; whether it wants to hear nothing of operations that fail."""

    tracer: GraphTracer | None = None
    is_quiet = False


_current = _Current()


def is_tracing_here() -> bool:
    """Whether this thread is tracing a function of ours."""
    return _current.tracer is not None


def make_graph(
    body: Callable[[Any], Sequence[Any]],
    decompositions: Decompositions,
    kind: Callable[[Any], GraphTracer] = GraphTracer,
    python_kernels: bool = True,
) -> fx.GraphModule:
    """The graph of what `body` does.

    Args:
        body: is given the tracer, on this thread; returns the graph's outputs.
        decompositions: by operator, as ``make_fx`` takes them.
        kind: of the tracer that `body` gets.
        python_kernels: whether torch's Python forms of operators are used where there are any. Symbolic sizes
            need them; they may differ in the last bit.

    Returns:
        A module whose placeholders stand first. Whoever changes the graph last recompiles it.
    """

    def traced() -> tuple[Any, ...]:
        mode = get_proxy_mode()
        assert mode is not None
        before, _current.tracer = _current.tracer, kind(mode.tracer)
        try:
            return tuple(body(_current.tracer))
        finally:
            _current.tracer.close()
            _current.tracer = before

    dispatcher = enable_python_dispatcher() if python_kernels else nullcontext()
    with tracing, dispatcher, _unseen(), lazily():
        gm = _GraphMaker(dict(decompositions), "real", False, False, False, False, True).trace(traced)
    _placeholders_first(gm.graph)
    return gm


class _GraphMaker(_MakefxTracer):
    """``make_fx``, with a tracer that patches nothing."""

    def _construct_modes_with_fx_tracer(self, fx_tracer: Any) -> None:
        fx_tracer.trace = partial(_trace, fx_tracer)
        super()._construct_modes_with_fx_tracer(fx_tracer)
        self.torch_fn_metadata_mode = nullcontext()  # nobody reads what it notes


def _trace(tracer: Any, root: Callable[[], Any], concrete_args: Any = None) -> fx.Graph:
    """What ``fx.Tracer.trace`` does for a function without arguments, but for its patches."""
    tracer.root = torch.nn.Module()
    tracer.tensor_attrs = {}
    tracer.graph = fx.Graph(tracer_cls=type(tracer))
    tracer.create_node("output", "output", (tracer.create_arg(root()),), {})
    graph: fx.Graph = tracer.graph
    return graph


def noted(**note: Any) -> AbstractContextManager[None]:
    """What is traced inside, on this thread, carries these entries in its metadata."""
    return _current.tracer.noting(**note) if _current.tracer is not None else nullcontext()


def noted_here() -> Mapping[str, Any]:
    """The entries that nodes carry which are traced now."""
    return _current.tracer.note if _current.tracer is not None else {}


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, an operation that fails on fake tensors is not logged as an error: it becomes a reason. The
    user's saved-tensor hooks do not see the graphs that are made, which are our own."""
    before, _current.is_quiet = _current.is_quiet, True
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    try:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor) if hooked else nullcontext():
            yield
    finally:
        _current.is_quiet = before


logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _current.is_quiet)


def _placeholders_first(graph: fx.Graph) -> None:
    anchor = next(iter(graph.nodes))
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        if node is anchor:
            anchor = anchor.next
        else:
            anchor.prepend(node)


_TORCH = tuple(path + "/" for path in torch.__path__)
_OURS = __file__.rsplit("/_torch/", 1)[0] + "/"


def _users_line() -> str:
    """The innermost line of code that is neither torch's nor ours, as a stack trace of one entry."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, *_TORCH, "<")):
            return f'  File "{name}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'
        frame = frame.f_back  # type: ignore[assignment]
    return ""
