"""The steps of a plan as one Python function: what it costs to go from step to step is a few local variables.

In: a `Schedule` and what each of its segments runs. Out: the text of the function and what it refers to.
Every value is a local variable, deleted at its last use. The function is called with what the engine
collected; it returns the plan's outputs, or None if its guard does not hold (nothing is consumed then), or,
where a step must be left to the plan, the number of that step and the values at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from retrograd._torch.autograd import versions_of
from retrograd._torch.state import torch_functions_off
from retrograd.graph.backward_graph import Source, SourceKind, call_of
from retrograd.graph.hook_kind import CallKind, HookKind
from retrograd.graph.schedule import Accumulation, OpaqueCall, Schedule, Segment
from retrograd.live.calls.gradients import accumulate_grad
from retrograd.live.calls.many_gradients import Accumulator

Check = Callable[[Sequence[Any]], bool]

_LISTS = {
    SourceKind.INPUT: "inputs",
    SourceKind.SIZE: "sizes",
    SourceKind.SCALAR: "scalars",
    SourceKind.HOOK: "hooks",
    SourceKind.PACKED: "packed",
}


@dataclass(frozen=True)
class Code:
    """What one segment runs.

    Attributes:
        run: takes a list of the inputs at `fed` and returns the outputs that are not None.
        fed: positions among the segment's inputs.
        given: for each output of the segment, whether `run` returns it; else it is None.
        check: whether `run` fits the segment's inputs; None if that is known.
        is_compiled: whether it is a backend's code; if not, it is the segment itself.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    fed: tuple[int, ...]
    given: tuple[bool, ...]
    check: Check | None
    is_compiled: bool


@dataclass
class GeneratedSource:
    """A function as text.

    Attributes:
        lines: the text. names: what it refers to. values: the FX node of each local variable.
        steps: by line number, the step whose code is called there.
        watched: by step, the local variable of the versions that it expects, and the nodes that have them.
    """

    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    values: dict[str, fx.Node] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    watched: dict[int, tuple[str, tuple[fx.Node, ...]]] = field(default_factory=dict)

    def function(self) -> Callable[..., Any]:
        """The function itself."""
        scope = dict(self.names)
        exec(compile("\n".join(self.lines), "<settled plan>", "exec"), scope)
        made: Callable[..., Any] = scope["settled"]
        return made


@dataclass(frozen=True)
class PlanLayout:
    """What is written.

    Attributes:
        schedule: the steps. codes: what each of its segments runs, by step.
        placeholders: where values come from. lengths: of the lists that the engine hands over.
        outputs: what is returned.
        guard: whether the values of `guarded` fit; None if there is nothing to ask.
        saved: placeholders whose version matters after user code has run.
    """

    schedule: Schedule
    codes: Mapping[int, Code]
    placeholders: Sequence[tuple[fx.Node, Source]]
    lengths: Mapping[SourceKind, int]
    outputs: Sequence[fx.Node | None]
    guard: Check | None
    guarded: Sequence[fx.Node]
    saved: frozenset[fx.Node]


def write(laid: PlanLayout) -> GeneratedSource:
    """The function for `laid`."""
    return _Writer(laid).written


class _Writer:
    def __init__(self, laid: PlanLayout) -> None:
        self._laid = laid
        self.written = GeneratedSource()
        self._local: dict[fx.Node, str] = {}
        self._indent = 0
        self._begin()
        number = 0
        steps = laid.schedule.steps
        while number < len(steps):
            number = (
                self._stretch(number) if not isinstance(steps[number], OpaqueCall) else self._opaque(number)
            )
        self._line(f"return [{', '.join('None' if n is None else self._name(n) for n in laid.outputs)}]")

    # text

    def _line(self, text: str, step: int | None = None) -> None:
        self.written.lines.append("    " * self._indent + text)
        if step is not None:
            self.written.steps[len(self.written.lines)] = step

    @contextmanager
    def _block(self, head: str) -> Iterator[None]:
        self._line(head)
        self._indent += 1
        yield
        self._indent -= 1

    def _name(self, node: fx.Node) -> str:
        if node not in self._local:
            self._local[node] = name = f"v{len(self._local)}"
            self.written.values[name] = node
        return self._local[node]

    def _refer(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{len(self.written.names)}"
        self.written.names[name] = value
        return name

    def _listed(self, nodes: Iterable[fx.Node]) -> str:
        return f"[{', '.join(map(self._name, nodes))}]"

    def _delete(self, nodes: Iterable[fx.Node]) -> None:
        names = [self._local[node] for node in nodes if node in self._local]
        if names:
            self._line(f"del {', '.join(names)}")

    def _expression(self, argument: Any) -> str:
        """An FX argument, with local variables for its nodes."""
        if isinstance(argument, fx.Node):
            return self._name(argument)
        if isinstance(argument, list):
            return f"[{', '.join(map(self._expression, argument))}]"
        if isinstance(argument, tuple):
            return f"({''.join(self._expression(item) + ', ' for item in argument)})"
        if isinstance(argument, dict):
            items = (f"{self._refer('k', k)}: {self._expression(v)}" for k, v in argument.items())
            return f"{{{', '.join(items)}}}"
        return repr(argument) if type(argument) in (int, bool, type(None)) else self._refer("c", argument)

    # the beginning

    def _begin(self) -> None:
        self.written.names.update(
            versions=versions_of,
            quiet=torch_functions_off,
            accumulate_one=accumulate_grad,
        )
        self._line("def settled(call, running, changes, user):")
        self._indent = 1
        bound = {(source.kind, source.index): node for node, source in self._laid.placeholders if node.users}
        unused = False
        for kind, name in _LISTS.items():
            length = self._laid.lengths[kind]
            nodes = [bound.get((kind, i)) for i in range(length)]
            if any(nodes):
                targets = ", ".join("_" if node is None else self._name(node) for node in nodes)
                self._line(f"{targets}, = call.{name}")
                unused |= None in nodes
        if unused:
            self._line("del _")
        if self._laid.guard is not None:
            guard = self._refer("guard", self._laid.guard)
            self._line(f"if not {guard}({self._listed(self._laid.guarded)}): return None")
        self._line("; ".join(f"call.{name}.clear()" for name in _LISTS.values()))
        self._take_versions()

    def _take_versions(self) -> None:
        """The versions of saved tensors that are read after user code has run."""
        had_user_code = False
        for number, step in enumerate(self._laid.schedule.steps):
            read: Sequence[fx.Node] = ()
            if isinstance(step, Segment):
                read = step.inputs
            elif isinstance(step, OpaqueCall) and call_of(step.node).kind is CallKind.FUNCTION:
                read = step.node.all_input_nodes
            saved = tuple(node for node in read if node in self._laid.saved)
            if saved and had_user_code:
                self.written.watched[number] = (f"w{number}", saved)
                self._line(f"w{number} = versions({self._listed(saved)})")
            had_user_code |= isinstance(step, OpaqueCall)

    def _leave_if_changed(self, number: int) -> None:
        if number in self.written.watched:
            name, saved = self.written.watched[number]
            self._line(f"if versions({self._listed(saved)}) != {name}: return {number}, locals()")

    # the steps

    def _stretch(self, number: int) -> int:
        """Steps without user code; returns the number of the step after them."""
        steps = self._laid.schedule.steps
        code = self._laid.codes.get(number)
        if code is not None and not code.is_compiled:
            self._segment(number, code)
            return number + 1
        with self._block("with quiet():"):
            while number < len(steps):
                step = steps[number]
                if isinstance(step, OpaqueCall):
                    break
                if isinstance(step, Accumulation):
                    number = self._accumulations(number)
                    continue
                code = self._laid.codes[number]
                if not code.is_compiled:
                    break
                self._segment(number, code)
                number += 1
        return number

    def _segment(self, number: int, code: Code) -> None:
        step = self._laid.schedule.steps[number]
        assert isinstance(step, Segment)
        self._leave_if_changed(number)
        if code.check is not None:
            check = self._refer("check", code.check)
            self._line(f"if not {check}({self._listed(step.inputs)}): return {number}, locals()")
        self._line(f"args = {self._listed(step.inputs[i] for i in code.fed)}")
        self._delete(node for node in step.inputs if node in self._laid.schedule.dying[number])
        pairs = list(zip(step.outputs, code.given, strict=True))
        made = [self._name(node) for node, is_given in pairs if is_given]
        targets = f"{', '.join(made)}, = " if made else ""
        self._line(f"{targets}{self._refer('run', code.run)}(args)", step=number)
        self._line("del args")
        for node, is_given in pairs:
            if not is_given:
                self._line(f"{self._name(node)} = None")

    def _accumulations(self, number: int) -> int:
        """Consecutive accumulations; returns the number of the step after them."""
        steps, dying = self._laid.schedule.steps, self._laid.schedule.dying
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
        self._line(f"grads = {self._listed(grads)}")
        self._delete(node for node in gone if node in grads)
        if accumulations[0].args[2]:
            kept = grads[0] not in gone and is_only_for_post_hooks(accumulations[0])
            self._line(f"accumulate_one({self._name(variables[0])}, grads, {kept})")
        else:
            accumulator = self._refer("accumulate", Accumulator())
            self._line(f"{accumulator}(({', '.join(map(self._name, variables))},), grads)")
        self._delete(node for node in gone if node not in grads)
        return number

    def _opaque(self, number: int) -> int:
        step, dying = self._laid.schedule.steps[number], self._laid.schedule.dying[number]
        assert isinstance(step, OpaqueCall)
        self._leave_if_changed(number)
        self._line(f"running.node_call = {call_of(step.node).node_call}")
        self._line(f"args = {self._expression(list(step.node.args))}")
        made = [step.node, *step.projections]
        self._delete(node for node in dying if node not in made)
        self._line(f"result = user.call({self._refer('call', step.node.target)}, args)")
        self._line("del args")
        for node in step.projections:
            if node not in dying:
                self._line(f"{self._name(node)} = result[{self._expression(node.args[1])}]")
        if step.node not in dying:
            self._line(f"{self._name(step.node)} = result")
        self._line("del result")
        self._line(f"if changes or user.has_changed_modes(): return {number + 1}, locals()")
        return number + 1


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
