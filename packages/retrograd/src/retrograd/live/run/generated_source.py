"""The steps of a plan as one Python function: to go from step to step costs a few local variables.

In: a `Schedule` and what each of its segments runs. Out: the text of the function and what it refers to.
Every value is a local variable, deleted at its last use. The function is called with what the engine
collected. It returns the plan's outputs; or None if its guard does not hold (nothing is consumed then); or,
where a step must be left to the plan, the number of that step and the values at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from retrograd._torch.autograd import Collected, versions_of
from retrograd._torch.state import torch_functions_off
from retrograd.graph.backward_graph import (
    Accumulation,
    CallKind,
    HookKind,
    OpaqueCall,
    PlanStep,
    Schedule,
    Segment,
    Source,
    SourceKind,
    call_of,
    dying_values,
    is_alias,
)
from retrograd.graph.emit import Emitter, emit_calls
from retrograd.live.calls.gradients import Accumulator, OutputCheck, RememberingCheck, accumulate_quietly

Check = Callable[[Sequence[Any]], bool]

#: calls that no class of tensors written in Python takes over: the engine's own closures, and ours.
_NATIVE = frozenset({CallKind.NODE, CallKind.VALIDATE, CallKind.PROJECT, CallKind.SUM, CallKind.COPY_SLICES})

_LISTS = {
    SourceKind.INPUT: "inputs",
    SourceKind.SIZE: "sizes",
    SourceKind.SCALAR: "scalars",
    SourceKind.HOOK: "hooks",
    SourceKind.PACKED: "packed",
}


@dataclass(frozen=True)
class Code:
    """What one segment runs: a backend's code.

    Attributes:
        run: takes a list of the inputs at `fed` and returns the outputs that are not None.
        fed: positions among the segment's inputs.
        given: for each output of the segment, whether `run` returns it; else it is None.
        check: whether `run` fits the segment's inputs; None if that is known.
        failed: is told what `run` raised.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    fed: tuple[int, ...]
    given: tuple[bool, ...]
    check: Check | None
    failed: Callable[[Exception], None]


@dataclass(frozen=True)
class PlanLayout:
    """What is written.

    Attributes:
        schedule: the steps.
        placeholders: where values come from.
        outputs: what is returned.
        saved: placeholders whose version matters after user code has run.
        codes: what segments run, by step; the calls of the others stand in the function themselves.
        lengths: of the lists that the engine hands over.
        guard: whether the values of `guarded` fit; None if there is nothing to ask.
    """

    schedule: Schedule
    placeholders: Sequence[tuple[fx.Node, Source]]
    outputs: Sequence[fx.Node | None]
    saved: frozenset[fx.Node]
    codes: Mapping[int, Code] = field(default_factory=dict)
    lengths: Mapping[SourceKind, int] = field(default_factory=dict)
    guard: Check | None = None
    guarded: Sequence[fx.Node] = ()

    def with_steps(self, steps: Sequence[PlanStep], codes: Sequence[Code]) -> PlanLayout:
        """Other steps, and the codes of the segments among them."""
        reads = [step.inputs if isinstance(step, Segment) else step.node.all_input_nodes for step in steps]
        segments = [number for number, step in enumerate(steps) if isinstance(step, Segment)]
        schedule = Schedule(tuple(steps), dying_values(reads, self.outputs))
        return replace(self, schedule=schedule, codes=dict(zip(segments, codes, strict=True)))


def lists_of(call: Collected) -> dict[SourceKind, list[Any]]:
    """What the engine collected, by kind."""
    return {kind: getattr(call, name) for kind, name in _LISTS.items()}


class GeneratedSource:
    """The function for a `PlanLayout`, as text.

    Attributes:
        emit: its lines and variables.
        watched: by step, saved tensors with the places of their versions in the local variable `versions`.
    """

    def __init__(self, layout: PlanLayout) -> None:
        self._layout = layout
        self.emit = emit = Emitter("run_backward(call, backward, changes, user)")
        self.watched: dict[int, list[tuple[int, fx.Node]]] = {}
        self._begin()
        number = 0
        steps = layout.schedule.steps
        while number < len(steps):
            number = (
                self._stretch(number) if not isinstance(steps[number], OpaqueCall) else self._opaque(number)
            )
        emit.line(f"return [{', '.join('None' if n is None else emit.name(n) for n in layout.outputs)}]")

    # the beginning

    def _begin(self) -> None:
        self.emit.names.update(
            versions_of=versions_of, quiet=torch_functions_off, accumulate_one=accumulate_quietly
        )
        bound = {
            (source.kind, source.index): node for node, source in self._layout.placeholders if node.users
        }
        unused = False
        for kind, name in _LISTS.items():
            length = self._layout.lengths[kind]
            nodes = [bound.get((kind, i)) for i in range(length)]
            if any(nodes):
                targets = ", ".join("_" if node is None else self.emit.name(node) for node in nodes)
                self.emit.line(f"{targets}, = call.{name}")
                unused |= None in nodes
        if unused:
            self.emit.line("del _")
        if self._layout.guard is not None:
            guard = self.emit.refer("guard", self._layout.guard)
            self.emit.line(f"if not {guard}({self.emit.listed(self._layout.guarded)}): return None")
        self.emit.line("; ".join(f"call.{name}.clear()" for name in _LISTS.values()))
        self._take_versions()

    def _take_versions(self) -> None:
        """The versions of saved tensors that are read after something may have changed them: user code, or an
        addition to a ``.grad`` that shares their memory."""
        may_be_changed = False
        watched: list[fx.Node] = []
        for number, step in enumerate(self._layout.schedule.steps):
            read: Sequence[fx.Node] = ()
            if isinstance(step, Segment):
                read = step.inputs
            elif isinstance(step, OpaqueCall) and call_of(step.node).kind is CallKind.FUNCTION:
                read = step.node.all_input_nodes
            saved = [node for node in read if node in self._layout.saved] if may_be_changed else []
            if saved:
                self.watched[number] = list(enumerate(saved, len(watched)))
                watched += saved
            may_be_changed |= not isinstance(step, Segment)
        if watched:
            self.emit.line(f"versions = versions_of({self.emit.listed(watched)})")
            self.emit.line("if None in versions: return 0, locals()")

    def _leave_if_changed(self, number: int) -> None:
        if saved := self.watched.get(number):
            tests = (f"{self.emit.name(node)}._version != versions[{place}]" for place, node in saved)
            self.emit.line(f"if {' or '.join(tests)}: return {number}, locals()")

    # the steps

    def _stretch(self, number: int) -> int:
        """Steps without user code; returns the number of the step after them."""
        steps = self._layout.schedule.steps
        if self._is_loud(number):
            self._segment(number)
            return number + 1
        with self.emit.block("with quiet():"):
            while number < len(steps):
                step = steps[number]
                if isinstance(step, OpaqueCall) or self._is_loud(number):
                    break
                if isinstance(step, Accumulation):
                    number = self._accumulations(number)
                    continue
                self._segment(number)
                number += 1
        return number

    def _is_loud(self, number: int) -> bool:
        """Whether the step is a segment that calls Python functions as they are: classes of tensors written
        in Python may take them over."""
        step = self._layout.schedule.steps[number]
        if not isinstance(step, Segment) or number in self._layout.codes:
            return False
        return any(call_of(node).kind not in _NATIVE for node in step.nodes)

    def _segment(self, number: int) -> None:
        step, code = self._layout.schedule.steps[number], self._layout.codes.get(number)
        assert isinstance(step, Segment)
        self._leave_if_changed(number)
        gone = [node for node in step.inputs if node in self._layout.schedule.dying[number]]
        if code is None:
            gone += set(step.nodes) - set(step.outputs)
            emit_calls(self.emit, step.nodes, gone, instead=self._shorter)
            return
        if code.check is not None:
            check = self.emit.refer("check", code.check)
            self.emit.line(f"if not {check}({self.emit.listed(step.inputs)}): return {number}, locals()")
        self.emit.line(f"args = {self.emit.listed(step.inputs[i] for i in code.fed)}")
        self.emit.let_go(gone)
        pairs = list(zip(step.outputs, code.given, strict=True))
        run, failed = self.emit.refer("run", code.run), self.emit.refer("failed", code.failed)
        with self.emit.block("try:"):
            self.emit.unpack((node for node, is_given in pairs if is_given), f"{run}(args)")
        self.emit.line(f"except Exception as error: {failed}(error); raise")
        self.emit.line("del args")
        for node, is_given in pairs:
            if not is_given:
                self.emit.line(f"{self.emit.name(node)} = None")

    def _shorter(self, node: fx.Node) -> str | None:
        """What gives the same as a call of a node or a check, and is quicker."""
        if _returns_what_it_is_given(node):
            return self.emit.expression(node.args[0])
        if call_of(node).kind is not CallKind.VALIDATE or not isinstance(node.target, OutputCheck):
            return None
        if any(arg not in node.args[0] for arg in node.all_input_nodes):  # type: ignore[operator]
            return None  # a size differs from run to run
        check = self.emit.refer("check", RememberingCheck(node.target, node.args[1:]))
        return f"{check}({self.emit.expression(node.args[0])})"

    def _accumulations(self, number: int) -> int:
        """Consecutive accumulations; returns the number of the step after them."""
        steps, dying = self._layout.schedule.steps, self._layout.schedule.dying
        batch: list[int] = []
        while number < len(steps):
            step = steps[number]
            if not isinstance(step, Accumulation) or (batch and step.node.args[2]):
                break
            batch.append(number)
            number += 1
            if step.node.args[2]:  # its hooks see the gradient
                break
        gone = list(dict.fromkeys(node for i in batch for node in dying[i]))
        accumulations = [step.node for step in steps[batch[0] : number] if isinstance(step, Accumulation)]
        variables: list[fx.Node] = [node.args[0] for node in accumulations]  # type: ignore[misc]
        grads: list[fx.Node] = [node.args[1] for node in accumulations]  # type: ignore[misc]
        self.emit.line(f"grads = {self.emit.listed(grads)}")
        self.emit.let_go(node for node in gone if node in grads)
        if len(batch) == 1:
            kept = (
                bool(accumulations[0].args[2])
                and grads[0] not in gone
                and is_only_for_post_hooks(accumulations[0])
            )
            self.emit.line(f"accumulate_one({self.emit.name(variables[0])}, grads, {kept})")
        else:
            accumulator = self.emit.refer("accumulate", Accumulator())
            self.emit.line(f"{accumulator}(({', '.join(map(self.emit.name, variables))},), grads)")
        self.emit.let_go(node for node in gone if node not in grads)
        return number

    def _opaque(self, number: int) -> int:
        step, dying = self._layout.schedule.steps[number], self._layout.schedule.dying[number]
        assert isinstance(step, OpaqueCall)
        self._leave_if_changed(number)
        self.emit.line(f"backward.node_call = {call_of(step.node).node_call}")
        self.emit.line(f"args = {self.emit.expression(list(step.node.args))}")
        made = [step.node, *step.projections]
        self.emit.let_go(node for node in dying if node not in made)
        self.emit.line(f"result = user.call({self.emit.refer('call', step.node.target)}, args)")
        self.emit.line("del args")
        for node in step.projections:
            if node not in dying:
                self.emit.line(f"{self.emit.name(node)} = result[{self.emit.expression(node.args[1])}]")
        if step.node not in dying:
            self.emit.line(f"{self.emit.name(step.node)} = result")
        self.emit.line("del result")
        self.emit.line(f"if changes or user.has_changed_modes(): return {number + 1}, locals()")
        return number + 1


def _returns_what_it_is_given(node: fx.Node) -> bool:
    """Whether the call is the backward of an alias, or checks its results as its gradients were checked."""
    if call_of(node).kind is not CallKind.VALIDATE:
        return is_alias(node)
    results, asked = node.args[:2]
    return all(_is_checked(*pair) for pair in zip(results, asked, strict=True))  # type: ignore[arg-type]


def _is_checked(result: Any, asked: Any) -> bool:
    """Whether the result of an alias's backward was checked before against the same metadata."""
    for is_step in (is_alias, lambda node: call_of(node).kind is CallKind.VALIDATE):
        if result is None or result.op != "call_function" or call_of(result).kind is not CallKind.PROJECT:
            return False
        node, place = result.args
        if not is_step(node):
            return False
        result, last = node.args[0][place], node
    return bool(last.args[1][place] == asked)


def is_only_for_post_hooks(accumulation: fx.Node) -> bool:
    """Whether the plan keeps the gradient for nothing but the post hooks of this AccumulateGrad node."""
    grad = accumulation.args[1]
    assert isinstance(grad, fx.Node)
    later = [user for user in grad.users if accumulation < user]
    own = call_of(accumulation).node_call
    return all(
        user.op == "call_function"
        and call_of(user).hook is HookKind.NODE_POST
        and call_of(user).node_call == own
        for user in later
    )
