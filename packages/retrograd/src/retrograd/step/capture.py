"""Trace a training step once: forward, backward, hooks and the steps of optimizers, as one graph.

In: a function, its arguments, and what it reaches. Out: a `StepGraph`. The function runs on stand-ins of its
tensors, functionalised, and torch's own engine runs its backwards: whatever order eager has, the trace has.
Python objects are as they were afterwards, also if the trace fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd._torch import pytree
from retrograd._torch.ambient import Ambient
from retrograd._torch.autograd_reach import nodes_behind
from retrograd._torch.fakes import new_fake_mode
from retrograd._torch.functional import (
    functional_mode,
    is_traced,
    plain,
    storage_key,
    was_data_mutated,
    was_metadata_mutated,
    was_storage_changed,
)
from retrograd._torch.joint_tracing import JointTracer, ReseededError, trace_joint
from retrograd._torch.memory import groups_sharing_memory
from retrograd._torch.operators import is_random, real_tensors
from retrograd._torch.scalars import symbolic_float, texts_refused
from retrograd._torch.stand_ins import StandIns, StepRefusedError
from retrograd.errors import CaptureError, Reason, RetrogradError
from retrograd.step.observe import Observed, SideEffectError, observing, users_line
from retrograd.step.plan import Argument, GradOf, Held, NewGrad, Number, Result, Source, StepGraph
from retrograd.step.settle import settle
from retrograd.step.snapshot import SCALARS
from retrograd.step.watch import Reached

__all__ = ["Call", "capture"]

_VALUES = ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a step.

    Attributes:
        fn: the step; `leaves` and `spec`: its arguments, flat, and how they are nested.
        reached: what it reaches.
        symbolic: by place of an argument, which dimensions are symbolic.
        numbers: entries of parameter groups that are inputs.
    """

    fn: Any
    leaves: Sequence[Any]
    spec: Any
    reached: Reached
    symbolic: Mapping[int, frozenset[int]]
    numbers: Sequence[Number] = ()


def capture(call: Call) -> StepGraph:
    """Trace the call.

    Raises:
        CaptureError: it does what a graph cannot hold; the cause is chained. Nothing has changed.
    """
    trace = _Trace(call)
    is_symbolic = any(call.symbolic.values())
    grads = [(tensor, tensor.grad) for tensor, _ in call.reached.tensors.values() if tensor.is_leaf]
    try:
        gm = trace_joint(trace.body, trace.fake_mode, {}, is_symbolic)
        trace.refuse_leaks(grads)
        return trace.result(gm)
    except RetrogradError:
        raise
    except (Exception, SideEffectError) as error:
        raise _capture_error(call, error, trace.observed) from error
    finally:
        for tensor, grad in grads:
            if tensor.grad is not grad:
                tensor.grad = grad
        call.reached.restore()


def _capture_error(call: Call, error: BaseException, observed: Observed) -> CaptureError:
    name = getattr(call.fn, "__name__", type(call.fn).__name__)
    line = users_line(error)
    if isinstance(error, SideEffectError) and observed.effect is not None:
        code, (text, line) = "side-effect", observed.effect
    elif isinstance(error, StepRefusedError):
        code, text = error.code, str(error)
    elif type(error).__name__ in _VALUES:
        code, text = "reads-values", "needs to know the value of a tensor to go on"
    elif isinstance(error, ReseededError):
        code, text = "reseeded", "seeds a generator of random numbers before it draws from it"
    else:
        first = (str(error).strip().splitlines() or [""])[0]
        code, text = "trace-failed", f"cannot be traced: {type(error).__name__}: {first}"
    return CaptureError(
        Reason(
            code,
            f"{name} {text}",
            "step.capture",
            source=line,
            way_out="keep it out of the step, or let it run in pieces",
        )
    )


class _Trace:
    """One trace of one call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.fake_mode = new_fake_mode(symbolic=True)
        self.fake_mode.allow_non_fake_inputs = False
        self.observed = Observed()
        self._before: list[Any] = []

    def body(self, tracer: JointTracer) -> Sequence[Any]:
        """Run the step; the graph's outputs."""
        call = self._call
        self._ambient = Ambient.now()
        symbolic = {id(call.leaves[place]): dims for place, dims in call.symbolic.items()}
        with functional_mode(), self._ambient.restored():
            self._numbers = [self._number(tracer, number) for number in call.numbers]
            self._stand_ins = StandIns(tracer, self.fake_mode, symbolic, self.observed)
            args, kwargs = pytree.tree_unflatten(list(call.leaves), call.spec)
            given = pytree.tree_leaves((args, kwargs))
            # What was to be compiled inside of the step is part of its graph.
            stance = torch.compiler.set_stance("force_eager")
            with stance, self._stand_ins.running(), texts_refused(), observing(self.observed):
                returned = call.fn(*args, **kwargs)
            self._refuse_effects(given, pytree.tree_leaves((args, kwargs)))
            return self._outputs(returned)

    def _number(self, tracer: JointTracer, number: Number) -> Any:
        name = f"number_{number.path}"
        made = tracer.placeholder(
            f"number_{len(self._before)}",
            symbolic_float(self.fake_mode, float(number.group[number.key]), name),
        )
        self._before.append(number.group[number.key])
        number.group[number.key] = made
        return made

    def _refuse_effects(self, given: Sequence[Any], left: Sequence[Any]) -> None:
        if self.observed.effect is not None:
            raise SideEffectError(self.observed.effect[0])
        for number, made, before in zip(self._call.numbers, self._numbers, self._before, strict=True):
            if number.group[number.key] is made:
                number.group[number.key] = before
        if len(given) != len(left) or any(a is not b for a, b in zip(given, left, strict=True)):
            raise StepRefusedError("side-effect", "changes a container that it was given")
        if changes := self._call.reached.changes():
            raise StepRefusedError("side-effect", f"changes {changes[0]}, which a plan would not do")
        if torch.is_grad_enabled() != self._ambient.grad:
            raise StepRefusedError("side-effect", "leaves grad mode switched")
        for entry in self._stand_ins.found:
            if was_metadata_mutated(entry.made) or was_storage_changed(entry.made):
                raise StepRefusedError("tensor-changed", "changes the sizes or the memory of a tensor")

    def _outputs(self, returned: Any) -> list[Any]:
        """Note what becomes of them, and give the plain values."""
        self._values: list[Any] = []
        self._by_value: dict[int, int] = {}
        self._keep: list[Any] = []
        found = self._stand_ins.found
        self._places = {id(entry.made): place for place, entry in enumerate(found)}
        flat, self._spec = pytree.tree_flatten(returned, is_leaf=_is_size)
        self._results = [self._result(value) for value in flat]
        self._grads = [grad for place in range(len(found)) if (grad := self._grad(place)) is not None]
        self._written = {
            place: plain(entry.made) for place, entry in enumerate(found) if was_data_mutated(entry.made)
        }
        self._refuse_shared_memory()
        return [*self._values, *self._written.values()]

    def _output(self, value: Any) -> int:
        """The number of the graph's output for a traced value."""
        if id(value) not in self._by_value:
            self._by_value[id(value)] = len(self._values)
            self._keep.append(value)
            self._values.append(plain(value))
        return self._by_value[id(value)]

    def _result(self, value: Any) -> Result:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return Result(output=self._output(value))
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, SCALARS):
                raise StepRefusedError("returns", f"returns a {type(value).__name__}")
            return Result(constant=value)
        if not is_traced(value):
            return Result(input=self._places[id(self._stand_ins.of(value).made)])
        if id(value) in self._places:
            return Result(input=self._places[id(value)])
        if value.requires_grad:
            if value.grad_fn is None:
                raise StepRefusedError("returns", "returns a new tensor that requires grad and is a leaf")
            if value.grad_fn not in nodes_behind(self._stand_ins.spent):
                raise StepRefusedError("returns-graph", "returns a tensor whose graph may still be used")
        return Result(output=self._output(value), is_spent=value.requires_grad)

    def _grad(self, place: int) -> NewGrad | None:
        entry = self._stand_ins.found[place]
        now = entry.made.grad
        if entry.grad is None:
            if now is None:
                return None
        elif now is self._stand_ins.of(entry.grad).made:
            return None
        if now is None:
            return NewGrad(place)
        if now.requires_grad:
            raise StepRefusedError("returns-graph", "leaves a gradient whose graph may still be used")
        if id(now) in self._places:
            return NewGrad(place, input=self._places[id(now)])
        return NewGrad(place, output=self._output(now))

    def _refuse_shared_memory(self) -> None:
        found = self._stand_ins.found
        inputs = {storage_key(entry.made) for entry in found}
        keys = [storage_key(value) for value in self._keep if isinstance(value, torch.Tensor)]
        if any(key in inputs for key in keys) or len(set(keys)) != len(keys):
            raise StepRefusedError("shared-memory", "returns or leaves a view of another tensor")
        with real_tensors():
            groups = groups_sharing_memory({place: entry.real for place, entry in enumerate(found)})
        if any(place in self._written for group in groups for place in group):
            raise StepRefusedError("shared-memory", "changes a tensor that shares memory with another one")

    def refuse_leaks(self, grads: Sequence[tuple[torch.Tensor, Any]]) -> None:
        """Of what went around the stand-ins there must be no trace on real tensors."""
        if any(tensor.grad is not grad for tensor, grad in grads):
            raise StepRefusedError("leaf-escaped", "reaches a leaf in a way that torch does not show")

    def result(self, gm: fx.GraphModule) -> StepGraph:
        """The graph, settled, with what is to be done around it."""
        random = any(is_random(node) for node in gm.graph.nodes)
        if random and self.observed.is_state_touched:
            raise StepRefusedError("reseeded", "reads or sets the state of a generator and draws from it")
        numbers = len(self._numbers)
        used = settle(gm, [numbers + place for place in self._written], len(self._values))
        shift = _Shift(numbers)
        return StepGraph(
            gm=gm,
            sources=[*self._call.numbers, *map(self._source, range(len(self._stand_ins.found)))],
            examples=[*self._numbers, *[entry.fake for entry in self._stand_ins.found]],
            used=used,
            written=frozenset(numbers + place for place in self._written),
            grads=[shift.grad(grad) for grad in self._grads],
            lacking=[
                numbers + place
                for place, entry in enumerate(self._stand_ins.found)
                if entry.grad is None and _may_have_grad(entry.real)
            ],
            results=[shift.result(result) for result in self._results],
            spec=self._spec,
            fake_mode=self.fake_mode,
            shape_env=self.fake_mode.shape_env if numbers or any(self._call.symbolic.values()) else None,
            names=self.observed.names(),
            devices=self._devices() if random else (),
        )

    def _devices(self) -> tuple[torch.device, ...]:
        return tuple({entry.real.device for entry in self._stand_ins.found} | {torch.device("cpu")})

    def _source(self, place: int) -> Source:
        real = self._stand_ins.found[place].real
        for number, leaf in enumerate(self._call.leaves):
            if leaf is real and id(real) in self._call.reached.own:
                raise StepRefusedError("shared-memory", "is given a tensor that it reaches by itself too")
            if leaf is real:
                return Argument(number)
        if id(real) in self._call.reached.tensors:
            return Held(real, self._call.reached.tensors[id(real)][1])
        for owner, entry in enumerate(self._stand_ins.found):
            if entry.grad is real:
                return GradOf(len(self._numbers) + owner)
        raise StepRefusedError(
            "unknown-tensor", "uses a tensor that was found in a way that nobody can watch"
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _may_have_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


@dataclass(frozen=True)
class _Shift:
    """Places of tensors as places of placeholders, before which the numbers stand."""

    by: int

    def grad(self, grad: NewGrad) -> NewGrad:
        given = None if grad.input is None else grad.input + self.by
        return NewGrad(grad.source + self.by, grad.output, given)

    def result(self, result: Result) -> Result:
        given = None if result.input is None else result.input + self.by
        return Result(result.output, given, result.constant, result.is_spent)
