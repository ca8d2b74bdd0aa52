"""Generates one Python function for the steps of a plan, so that a step costs only a few local variables.

In: a `PlanLayout`, which has a schedule and the functions that run its segments. Out: the text of the
function and the objects that it refers to. Every value is a local variable, deleted at its last use. The
function receives what the engine collected, and returns one of three things. Usually it returns the plan's
outputs. If a saved tensor has no version counter, it returns None, and nothing was consumed. If user code has
changed what the remaining steps are, it returns the index of the next step and the current values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx

from retrograd.engine import States, raise_modified, states_of
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
)
from retrograd.graph.emit import Boxed, Emitter, emit_calls, with_room
from retrograd.live.calls.gradients import Accumulator, OutputCheck, RememberingCheck, accumulate_quietly
from retrograd.live.plan_log import PlanLog
from retrograd.runtime.modes import KeptModes, ModesKept, torch_functions_off

#: Calls that no tensor class written in Python can override: the engine's own closures, and ours.
_NATIVE = frozenset({CallKind.NODE, CallKind.VALIDATE, CallKind.PROJECT, CallKind.SUM, CallKind.COPY_SLICES})

_LISTS = {
    SourceKind.INPUT: "inputs",
    SourceKind.SIZE: "sizes",
    SourceKind.SCALAR: "scalars",
    SourceKind.HOOK: "hooks",
    SourceKind.PACKED: "packed",
}


@dataclass(frozen=True)
class PlanLayout:
    """The input of the generator.

    Attributes:
        schedule: the steps.
        placeholders: where values come from.
        outputs: what the function returns.
        saved: placeholders whose state matters after user code has run.
        runs: for each step that is a compiled segment, the function that runs it. It takes a list of the
            segment's inputs, which it empties, and returns the segment's outputs. Calls of other segments are
            written into the generated function itself.
        begun: for the rest of a backward, the states that saved tensors had when the backward began.
        leaked: modes that user code left switched, and the index of the node call that they affect.
        log: puts profiler ranges around the steps; None if no profiler runs.
    """

    schedule: Schedule
    placeholders: Sequence[tuple[fx.Node, Source]]
    outputs: Sequence[fx.Node | None]
    saved: frozenset[fx.Node]
    runs: Mapping[int, Boxed] = field(default_factory=dict)
    begun: States | None = None
    leaked: tuple[int, KeptModes] | None = None
    log: PlanLog | None = None

    def with_steps(self, steps: Sequence[PlanStep], runs: Sequence[Boxed]) -> PlanLayout:
        """The layout with other steps, and with `runs` for the segments among them."""
        reads = [step.inputs if isinstance(step, Segment) else step.node.all_input_nodes for step in steps]
        segments = [number for number, step in enumerate(steps) if isinstance(step, Segment)]
        schedule = Schedule(tuple(steps), dying_values(reads, self.outputs))
        return replace(self, schedule=schedule, runs=dict(zip(segments, runs, strict=True)))


class GeneratedSource:
    """The generated function of a `PlanLayout`.

    Attributes:
        emit: its lines and variables.
        function: the function.
        watched: saved tensors, in the order of their states in the variable `states`.
    """

    def __init__(self, layout: PlanLayout) -> None:
        self._layout = layout
        self._steps, self._dying = layout.schedule.steps, layout.schedule.dying
        calls = ((number, node) for number, step in enumerate(self._steps) for node in _nodes_of(step))
        self._last_of = {call_of(node).node_call: number for number, node in calls}
        self.emit = emit = Emitter("run_backward(call, backward, changes, user)")
        self.watched: list[fx.Node] = []
        self._checked: dict[int, dict[str, str]] = {}
        self._begin()
        number = 0
        while number < len(self._steps):
            number = self._stretch(number) if self._is_quiet(number) else self._single(number)
        emit.line(f"return [{', '.join('None' if n is None else emit.name(n) for n in layout.outputs)}]")
        self.function = with_room(emit.function())

    def found_in(self, variables: Mapping[str, Any]) -> tuple[dict[fx.Node, Any], States]:
        """The values among the function's local variables, and the states of saved tensors."""
        values = {node: variables[name] for node, name in self.emit.local.items() if name in variables}
        states = variables.get("states", self.emit.names.get("states", ()))
        return values, dict(zip(self.watched, states, strict=True))

    # the beginning

    def _begin(self) -> None:
        self.emit.names.update(
            states_of=states_of,
            quiet=torch_functions_off,
            accumulate_one=accumulate_quietly,
            raise_modified=raise_modified,
        )
        self._name_inputs()
        self._watch()
        if self._layout.begun is not None:
            self.emit.names["states"] = [self._layout.begun[node] for node in self.watched]
        elif self.watched:
            self.emit.line(f"states = states_of({self.emit.listed(self.watched)})")
            self.emit.line("if None in states: return None")
        self.emit.line("; ".join(f"call.{name}.clear()" for name in _LISTS.values()))

    def _name_inputs(self) -> None:
        unused = False
        for kind, name in _LISTS.items():
            bound = {s.index: node for node, s in self._layout.placeholders if s.kind is kind and node.users}
            if bound:
                nodes = [bound.get(i) for i in range(max(bound) + 1)]
                targets = ["_" if node is None else self.emit.name(node) for node in nodes]
                unused |= None in nodes
                # Without a star: Python allows 255 targets before one.
                self.emit.line(f"{', '.join(targets)}{',' * (len(nodes) == 1)} = call.{name}[:{len(nodes)}]")
        if unused:
            self.emit.line("del _")

    def _watch(self) -> None:
        """Watch saved tensors that are read after something may have changed them: user code, or an addition
        to a ``.grad`` that shares their memory."""
        may_be_changed = self._layout.begun is not None
        for number, step in enumerate(self._steps):
            read: Sequence[fx.Node] = ()
            if isinstance(step, Segment):
                read = step.inputs
            elif isinstance(step, OpaqueCall) and call_of(step.node).hook is None:
                read = step.node.all_input_nodes
            saved = [node for node in read if node in self._layout.saved] if may_be_changed else []
            if saved:
                places = enumerate(saved, len(self.watched))
                self._checked[number] = {self.emit.name(n): f"states[{place}]" for place, n in places}
                self.watched += saved
            may_be_changed |= not isinstance(step, Segment)

    def _if_changed(self, number: int, then: str) -> None:
        """Emit `then` for step `number`, under the condition that a saved tensor that the step reads was
        changed."""
        if saved := self._checked.get(number):
            tests = " or ".join(
                f"2 * {name}._version + {name}.is_leaf != {state}" for name, state in saved.items()
            )
            pairs = "".join(f"({name}, {state}), " for name, state in saved.items())
            self.emit.line(f"if {tests}: {then.format(f'({pairs})')}")

    # the steps

    def _is_quiet(self, number: int) -> bool:
        """Whether step `number` calls no Python function that a tensor class can override, and needs no
        context manager around it."""
        step = self._steps[number]
        if self._layout.log is not None or self._is_leaked(step) or isinstance(step, OpaqueCall):
            return False
        if isinstance(step, Accumulation):
            return True
        return number not in self._layout.runs and all(call_of(node).kind in _NATIVE for node in step.nodes)

    def _is_leaked(self, step: PlanStep) -> bool:
        """Whether the step runs in modes that user code left switched."""
        here = call_of(_nodes_of(step)[0]).node_call
        return self._layout.leaked is not None and here == self._layout.leaked[0]

    def _stretch(self, number: int) -> int:
        """Emit consecutive quiet steps. Return the index of the step after them."""
        with self.emit.block("with quiet():"):
            while number < len(self._steps) and self._is_quiet(number):
                step = self._steps[number]
                if isinstance(step, Segment):
                    self._if_changed(number, "raise_modified({})")
                    self._segment(number, step)
                number = self._accumulations(number) if isinstance(step, Accumulation) else number + 1
        return number

    def _single(self, number: int) -> int:
        """Emit one step with the context managers that it needs. Return the index of the next step."""
        step, around = self._steps[number], []
        if isinstance(step, Segment) and number in self._checked:
            with self.emit.block("with quiet():"):
                self._if_changed(number, "raise_modified({})")
        if self._layout.leaked is not None and self._is_leaked(step):
            around.append(self.emit.refer("leaked", partial(ModesKept, self._layout.leaked[1])))
        if self._layout.log is not None and not isinstance(step, Segment):
            around.append(self.emit.refer("range", partial(self._layout.log.step_range, step)))
        if isinstance(step, Accumulation):
            around.append("quiet")
        head = f"with {', '.join(f'{one}()' for one in around)}:"
        with self.emit.block(head) if around else nullcontext():
            if isinstance(step, Segment):
                self._segment(number, step)
            elif isinstance(step, Accumulation):
                self._accumulations(number, most=1)
            else:
                self._opaque(number, step)
        if isinstance(step, OpaqueCall):
            is_over = self._last_of[call_of(step.node).node_call] == number
            test = "changes" if is_over else "changes or user.left"
            self.emit.line(f"if {test}: return {number + 1}, locals()")
            self.emit.let_go(node for node in _held(step) if node in self._dying[number])
        return number + 1

    def _segment(self, number: int, step: Segment) -> None:
        gone = [node for node in step.inputs if node in self._dying[number]]
        run = self._layout.runs.get(number)
        if run is None:
            gone += set(step.nodes) - set(step.outputs)
            emit_calls(self.emit, step.nodes, gone, instead=self._shorter)
            return
        self.emit.line(f"args = {self.emit.listed(step.inputs)}")
        self.emit.let_go(gone)
        self.emit.unpack(step.outputs, f"{self.emit.refer('run', run)}(args)")
        self.emit.line("del args")

    def _shorter(self, node: fx.Node) -> str | None:
        """A faster expression with the same result as the call of a check; None if there is none."""
        if call_of(node).kind is not CallKind.VALIDATE or not isinstance(node.target, OutputCheck):
            return None
        if any(arg not in node.args[0] for arg in node.all_input_nodes):  # type: ignore[operator]
            return None  # a size may differ between runs
        check = self.emit.refer("check", RememberingCheck(node.target, node.args[1:]))
        return f"{check}({self.emit.expression(node.args[0])})"

    def _accumulations(self, number: int, most: int | None = None) -> int:
        """Emit consecutive accumulations, at most `most` of them. Return the index of the step after them."""
        batch: list[fx.Node] = []
        first = number
        while number < len(self._steps) and len(batch) != most:
            step = self._steps[number]
            if not isinstance(step, Accumulation) or (batch and step.node.args[2]):
                break
            batch.append(step.node)
            number += 1
            if step.node.args[2]:  # its post hooks read the gradient
                break
        gone = list(dict.fromkeys(node for i in range(first, number) for node in self._dying[i]))
        variables: list[fx.Node] = [node.args[0] for node in batch]  # type: ignore[misc]
        grads: list[fx.Node] = [node.args[1] for node in batch]  # type: ignore[misc]
        self.emit.line(f"grads = {self.emit.listed(grads)}")
        self.emit.let_go(node for node in gone if node in grads)
        if len(batch) == 1:
            kept = bool(batch[0].args[2]) and grads[0] not in gone and _is_only_for_post_hooks(batch[0])
            self.emit.line(f"accumulate_one({self.emit.name(variables[0])}, grads, {kept})")
        else:
            accumulator = self.emit.refer("accumulate", Accumulator())
            self.emit.line(f"{accumulator}(({', '.join(map(self.emit.name, variables))},), grads)")
        self.emit.let_go(node for node in gone if node not in grads)
        return number

    def _opaque(self, number: int, step: OpaqueCall) -> None:
        dying = [node for node in self._dying[number] if node not in _held(step)]
        self.emit.line(f"backward.node_call = {call_of(step.node).node_call}")
        self.emit.line(f"args = {self.emit.expression(list(step.node.args))}")
        is_function = call_of(step.node).kind is CallKind.FUNCTION
        self._if_changed(number, "args.append({})" if is_function else "raise_modified({})")
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


def _nodes_of(step: PlanStep) -> Sequence[fx.Node]:
    return step.nodes if isinstance(step, Segment) else (step.node,)


def _held(step: OpaqueCall) -> Sequence[fx.Node]:
    """The gradients of a Function, which live as long as its call: a post hook that its backward registers on
    its own node receives them."""
    is_function = call_of(step.node).kind is CallKind.FUNCTION
    return [node for node in step.node.args[1] if isinstance(node, fx.Node)] if is_function else ()  # type: ignore[union-attr]


def _is_only_for_post_hooks(accumulation: fx.Node) -> bool:
    """Whether the plan holds the gradient only for the post hooks of this AccumulateGrad node."""
    grad = accumulation.args[1]
    assert isinstance(grad, fx.Node)
    remaining = [user for user in grad.users if accumulation < user]
    own = call_of(accumulation).node_call
    return all(
        user.op == "call_function"
        and call_of(user).hook is HookKind.NODE_POST
        and call_of(user).node_call == own
        for user in remaining
    )
