"""Runs of calls that come again in a graph of Dynamo's are traced once, and written down for each copy.

In: the joint graph of one copy, traced by itself: `TracedRun`. While the whole graph is traced, `RunCopy` is
called in place of the calls of a copy. Out: the nodes that tracing these would have made, and one autograd
node, which writes those of their backward when it is called.

A copy is traced as usual where it is given other things than the one that was traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensor

from retrograd._torch.fx import KEPT_FOR
from retrograd._torch.state import ThreadModes, torch_functions_off
from retrograd._torch.trace.fakes import Form, form_of
from retrograd._torch.trace.functional import plain, to_functional
from retrograd._torch.trace.graph_tracer import JointTracer, tracer_here
from retrograd._torch.trace.interpret import CALL_OF_RUN, HANDED_ON
from retrograd._torch.trace.recall import NotedNode, Notes, Writing
from retrograd.errors import Refusal

#: entries of metadata that are of the place where a node is written.
_OF_PLACE = {"val", "eager_input_vals", "region", "is_backward", "seq_nr", KEPT_FOR, *HANDED_ON}
_OF_PLACE -= {CALL_OF_RUN}


class OtherCotangent(Exception):
    """A copy got a cotangent that is laid out otherwise than in the run that was traced: its `form`."""

    def __init__(self, copy: RunCopy, form: Form | None) -> None:
        super().__init__()
        self.copy, self.form = copy, form


@dataclass(frozen=True)
class RunInput:
    """What a run was given."""

    form: Form | None
    requires_grad: bool
    is_leaf: bool

    @staticmethod
    def of(value: torch.Tensor, fake: Any) -> RunInput:
        """Of a tensor of a trace, and the fake that it is."""
        return RunInput(form_of(fake), value.requires_grad, value.is_leaf)


@dataclass(frozen=True, eq=False)
class TracedRun:
    """A run of calls, traced.

    Attributes:
        inputs: what it was given. modes: those of the thread.
        forward, backward: the nodes. They are numbered from the inputs on, and the cotangent.
        outputs: numbers of the results. differentiable: which of them has a gradient; None if none has.
        cotangent: the form of its cotangent.
        gradients: numbers of what is contributed to gradients of inputs, or None where that is undefined, in
            the order in which it arrives; `contributed` has the inputs.
        steps: by autograd node of eager's, which of these it contributes.
        kept: numbers of what eager saves for it.
        saves: whether eager saves tensors for it. has_functions: whether Functions are among its nodes.
        undefined_matters: whether one of them tells an undefined gradient from zeros.
    """

    inputs: tuple[RunInput, ...]
    modes: ThreadModes
    forward: Sequence[NotedNode]
    backward: Sequence[NotedNode]
    outputs: tuple[int, ...]
    differentiable: int | None
    cotangent: Form | None
    gradients: tuple[int | None, ...]
    contributed: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    saves: bool
    has_functions: bool
    undefined_matters: bool


def noted_run(graph: fx.Graph) -> tuple[Notes, int]:
    """The joint graph of a run, noted: its nodes, of which so many are the forward's.

    Raises:
        Refusal: it cannot be written down again.
    """
    kept = {key for node in graph.nodes for key in node.meta} - _OF_PLACE
    inputs = [(node, node.meta["val"]) for node in graph.find_nodes(op="placeholder")]
    notes, forward = Notes(inputs, kept), 0
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            notes.add(node)
            forward += not node.meta.get("is_backward", False)
    return notes, forward


class RunCopy:
    """One copy of a run, called in place of its calls.

    Args:
        traced: the run, as far as it is known, for the form of a cotangent (None: laid out like the output).
        handed_on: what nodes of each of its calls are to know of it.
        otherwise: runs the calls themselves.

    Attributes:
        cotangent: the form that the cotangent will have.
        nodes: those that were written for it last, by number; None if its calls were traced.
    """

    __name__ = __qualname__ = "run"

    def __init__(
        self,
        traced: Mapping[Form | None, TracedRun | None],
        handed_on: Sequence[Mapping[str, Any]],
        otherwise: Callable[..., Any],
    ) -> None:
        self._traced, self._handed_on, self._otherwise = traced, handed_on, otherwise
        self.cotangent: Form | None = None
        self.nodes: Sequence[fx.Node] | None = None

    @property
    def run(self) -> TracedRun | None:
        """What is written for it."""
        return self._traced.get(self.cotangent)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Trace the copy: its outputs."""
        run, tracer, self.nodes = self.run, tracer_here(), None
        if run is not None and isinstance(tracer, JointTracer) and ThreadModes.now() == run.modes:
            with torch_functions_off():
                if _fits(run, args):
                    written = _Written(self, run, tracer, args)
                    self.nodes = written.nodes
                    return written.outputs(args)
        outputs: tuple[Any, ...] = self._otherwise(*args)
        return outputs

    def describe(self, node: fx.Node) -> None:
        """Write into a node what it is to know of the call that it comes from."""
        number = node.meta.pop(CALL_OF_RUN, None)
        if number is not None:
            node.meta.pop("stack_trace")
            node.meta.update(self._handed_on[number])


def _fits(run: TracedRun, args: Sequence[Any]) -> bool:
    if not all(type(arg) is FunctionalTensor for arg in args):
        return False
    return all(RunInput.of(arg, plain(arg)) == known for arg, known in zip(args, run.inputs, strict=True))


class _Written:
    """A copy that is written into a graph; first its forward, then its backward."""

    def __init__(self, copy: RunCopy, run: TracedRun, tracer: JointTracer, args: Sequence[Any]) -> None:
        self.copy, self.run, self._count = copy, run, len(args)
        self._writing = Writing(tracer.tracer, plain(args[0]).fake_mode)
        for fake in map(plain, args):
            node = tracer.node_of(fake)
            assert node is not None
            self._writing.give(node, fake)
        if run.differentiable is not None:
            self._writing.expect()
        with tracer.noting(stack_trace=""):  # that of the call takes its place
            self._write(run.forward)

    @property
    def nodes(self) -> Sequence[fx.Node]:
        """What was given and written so far."""
        return self._writing.nodes

    def outputs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The results, with their history; `args` are what the copy was given."""
        made = [to_functional(self._writing.values[number]) for number in self.run.outputs]
        if (place := self.run.differentiable) is not None:
            contributed = [args[number] for number in self.run.contributed]
            made[place] = RepeatedRun.apply(self, (made[place], *args), *contributed)
        return tuple(made)

    def gradients(self, grad: torch.Tensor | None) -> list[Any]:
        """The contributions."""
        if grad is None:
            if self.run.has_functions:
                raise Refusal("unnotable", "Functions of a run would get an undefined gradient")
            return [None] * len(self.run.gradients)
        fake, tracer = plain(grad), tracer_here()
        node = tracer.node_of(fake) if isinstance(tracer, JointTracer) else None
        if form_of(fake) != self.run.cotangent or node is None:
            raise OtherCotangent(self.copy, form_of(fake))
        self._writing.receive(self._count, node, fake)
        self._write(self.run.backward)
        made = [None if number is None else self._writing.values[number] for number in self.run.gradients]
        return [None if one is None else to_functional(one) for one in made]

    def _write(self, nodes: Sequence[NotedNode]) -> None:
        results = {*self.run.outputs, *self.run.gradients}
        for one in nodes:
            number = len(self._writing.nodes)
            self._writing.write(one, number in results)
            self.copy.describe(self._writing.nodes[number])


class RepeatedRun(torch.autograd.Function):
    """The autograd nodes of a copy, as one."""

    @staticmethod
    def forward(ctx: Any, written: _Written, seen: Sequence[torch.Tensor], *contributed: torch.Tensor) -> Any:
        """The first of the tensors that are `seen` outside, and that eager's nodes may have saved."""
        ctx.set_materialize_grads(False)
        ctx.written = written
        ctx.save_for_backward(*seen)
        return seen[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        """Write the backward. Raises: RuntimeError: one of those tensors was changed in place."""
        _ = ctx.saved_tensors
        return None, None, *ctx.written.gradients(grad)


def traced_run_of(node: Any) -> TracedRun | None:
    """The run whose autograd nodes `node` stands for."""
    if getattr(node, "_forward_cls", None) is not RepeatedRun:
        return None
    run: TracedRun = node.written.run
    return run


def kept_by_run(node: Any) -> list[fx.Node]:
    """What eager saves for the run whose autograd nodes `node` stands for."""
    written: _Written = node.written
    return [written.nodes[number] for number in written.run.kept]


# what calls of a graph switch

_ENTERS, _EXITS = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_SETS_GRAD_MODE = torch._C._set_grad_enabled
#: calls that give nothing, and after which others may do the same as before.
_KNOWN = (_ENTERS, _EXITS, _SETS_GRAD_MODE, torch._C._log_api_usage_once, operator.setitem)


def switched(calls: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Where grad mode or autocast are not as before all calls: after which call, and until which."""
    since: int | None = None
    depth, grad = 0, torch.is_grad_enabled()
    for i, node in enumerate(calls):
        depth += (node.target is _ENTERS) - (node.target is _EXITS)
        grad = bool(node.args[0]) if node.target is _SETS_GRAD_MODE else grad
        is_other = depth != 0 or grad != torch.is_grad_enabled()
        if is_other and since is None:
            since = i
        elif not is_other and since is not None:
            yield since, i
            since = None
    if since is not None:
        yield since, len(calls)


def switches_more(node: fx.Node) -> bool:
    """Whether the call switches what other calls depend on, besides autocast and grad mode."""
    if "functorch" in (getattr(node.target, "__module__", "") or ""):
        return True
    return node.meta.get("example_value") is None and node.target not in _KNOWN
