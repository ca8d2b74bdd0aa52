"""Trace a function together with its backward into one graph.

In: a body that is given a `JointTracer`. Out: the FX graph of what the body did. The body makes the
placeholders itself, in whatever order it comes to need them; in the graph they stand first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree

from retrograd._torch.ambient import autocast_off
from retrograd._torch.history import saved_tensors_unseen
from retrograd._torch.lazy_modules import lazily
from retrograd._torch.locks import ForkSafeLock
from retrograd._torch.operators import is_random
from retrograd._torch.rng import seeds_and_states
from retrograd._torch.tracing import quiet_fakes

__all__ = ["JointTracer", "ReseededError", "decomposed", "trace_joint"]

Decompositions = Mapping[Any, Callable[..., Any]]

#: tracers patch what all threads share.
_ONE_AT_A_TIME = ForkSafeLock()


class JointTracer:
    """What the body of a trace works with.

    Attributes:
        placeholders: in the order in which they are to stand in the graph.
    """

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._create_node = tracer.create_node
        self._note: dict[str, Any] = {}
        self._policy: Callable[..., Any] | None = None
        self._generators = seeds_and_states()
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
        before = self._note
        self._note = {**before, **note}
        try:
            yield
        finally:
            self._note = before

    @contextmanager
    def marking(self, policy: Callable[..., Any], group: int) -> Iterator[None]:
        """Every call made inside is marked with what `policy` (of an operator and its arguments) says about
        saving it."""
        before, self._policy = self._policy, policy
        try:
            with self.noting(ac_graph_id=group):
                yield
        finally:
            self._policy = before

    def _refuse_other_numbers(self) -> None:
        """Fake tensors draw nothing: if a generator has moved, the function has set it."""
        if seeds_and_states() != self._generators:
            raise ReseededError("it seeds a generator of random numbers before it draws from it")

    def _created(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = self._create_node(kind, *args, **kwargs)
        if kind == "call_function":
            if is_random(node) and "is_backward" not in self._note:
                self._refuse_other_numbers()
            node.meta.update(self._note)
            if "is_backward" not in self._note:
                node.meta.setdefault("seq_nr", torch._C._autograd._get_sequence_nr() - 1)
                if self._policy is not None:
                    node.meta["recompute"] = self._policy(node.target, *node.args, **node.kwargs)
                if "stack_trace" not in node.meta and (line := _users_line()):
                    node.meta["stack_trace"] = line
        return node


class ReseededError(Exception):
    """The traced function sets a generator of random numbers, which is no part of a graph."""


def trace_joint(
    body: Callable[[JointTracer], Sequence[Any]],
    fake_mode: FakeTensorMode,
    decompositions: Decompositions,
    is_symbolic: bool,
) -> fx.GraphModule:
    """Trace `body`, which returns plain (not functional) values; `is_symbolic`: whether some sizes are.
    Whoever changes the graph last recompiles it.

    Raises:
        Exception: whatever an operation raises on fake tensors.
    """

    def traced() -> tuple[Any, ...]:
        mode = get_proxy_mode()
        assert mode is not None
        return tuple(body(JointTracer(mode.tracer)))

    with (
        _ONE_AT_A_TIME,
        autocast_off(),
        fake_mode,
        _dispatcher(is_symbolic),
        quiet_fakes(),
        saved_tensors_unseen(),
        _said_to_compile(),
        lazily(),
    ):
        gm = make_fx(traced, decomposition_table=dict(decompositions), tracing_mode="real")()
    _placeholders_first(gm.graph)
    return gm


def _dispatcher(is_symbolic: bool) -> AbstractContextManager[Any]:
    """Symbolic sizes need torch's Python versions of operators, which may differ in the last bit."""
    return enable_python_dispatcher() if is_symbolic else nullcontext()


@contextmanager
def _said_to_compile() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true: code that looks at values asks for it."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


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


def decomposed(
    gm: fx.GraphModule, inputs: Sequence[Any], fake_mode: FakeTensorMode, table: Decompositions
) -> fx.GraphModule:
    """`gm` traced again with decompositions."""
    with torch.no_grad(), autocast_off(), fake_mode, enable_python_dispatcher(), quiet_fakes():
        return make_fx(gm, decomposition_table=dict(table), tracing_mode="real")(*inputs)
