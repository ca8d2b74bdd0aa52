"""Lowers one segment, and lowers it again if its guards fail.

In: a segment, as a function of a list of values, and the values that arrive. Out: a `Lowered` that fits the
values and computes the segment's outputs; or the reason why the segment is interpreted.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from retrograd.backends.background import PendingCode, begin, is_taken
from retrograd.backends.base import Backend, Boxed
from retrograd.backends.fallible import compile_fallible
from retrograd.config import Config
from retrograd.errors import LoweringError, Reason, Refusal, first_line
from retrograd.events import counters, live_log
from retrograd.graph.backward_graph import CallKind, Segment, call_name, call_of
from retrograd.graph.emit import boxed_calls, last_uses
from retrograd.graph.fx import copied
from retrograd.live.plan_log import PlanLog
from retrograd.policy import NAMED_NODES
from retrograd.process import cached_property, restored_on_error
from retrograd.report import INTERPRETED, LoweringReport, tell
from retrograd.runtime.modes import (
    ThreadModes,
    compile_stance,
    without_autocast,
    without_torch_functions,
)
from retrograd.runtime.profiler import profiling
from retrograd.runtime.subclass import SubclassBorder, is_wrapper
from retrograd.runtime.tensor import is_not_in_memory
from retrograd.trace import InputGuard, Traced, changed_sizes, trace


@dataclass(eq=False)
class Lowered:
    """One lowering: code, and the guards for its use.

    Attributes:
        guard: must hold for the arguments.
        modes: must be the thread's modes.
        run: the backend's code. It takes the arguments at the indices `fed`.
        fed: indices of the arguments that the code takes.
        given: for each output, its index among the results of the code; None for an output that is None.
        graph: the ATen graph.
        border: flattens tensor subclasses; None if there are none.
        has_run: whether the code has run.
        is_deterministic: whether eager has run in its place without an error about an operation that is not
            deterministic.
        pending: the code while it is compiled in the background.
    """

    guard: InputGuard
    modes: ThreadModes
    run: Boxed
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    graph: fx.Graph
    border: SubclassBorder | None
    has_run: bool = False
    is_deterministic: bool = False
    pending: PendingCode | None = None

    def guards(self) -> str:
        """The guards as text, for the report."""
        return str(self.guard) if self.border is None else f"{self.border}; {self.guard}"

    def flat(self, args: list[Any]) -> list[Any] | None:
        """The values that the code takes, if `args` fit; None if they do not."""
        flat = args if self.border is None else self.border.enter(args)
        return flat if flat is not None and self.guard.check(flat) else None

    @without_torch_functions
    def __call__(self, args: list[Any], flat: list[Any], run: Boxed) -> list[Any]:
        """Compute the outputs with `run`, which is the code or a CUDA-graph recording of it. Both lists are
        emptied."""
        passed = {} if self.border is None else self.border.passed_through(args)
        inputs = [flat[i] for i in self.fed]
        args.clear()
        flat.clear()
        results = run(inputs)
        outputs = [None if place is None else results[place] for place in self.given]
        return outputs if self.border is None else self.border.exit(outputs, passed)


@dataclass(eq=False)
class Lowerings:
    """The lowerings of one function. All segments that compute the same function share them.

    Attributes:
        codes: the newest first.
        interpret_because: why it cannot be lowered; None if it could be, or was not tried yet.
        raised_in: the name of the call that could not be traced; None if there is none.
        reason: the full reason why it cannot be lowered, if the backend gave one.
    """

    codes: list[Lowered] = field(default_factory=list)
    interpret_because: str | None = None
    raised_in: str | None = None
    reason: Reason | None = None


#: what falls back, for the report
INTERPRETED_PART = "a part of a backward was interpreted"

_WAY_OUT = "name the node in opaque=, or do nothing: outside strict mode, only this segment is not compiled"

Around = Callable[[fx.Node], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class SegmentFunction:
    """A segment as a function of a list of values, which it empties, and how to lower it.

    Attributes:
        segment: its calls.
        number: its index among the segments of its schedule.
        config: the settings.
        backend: lowers it.
        log: receives every lowering.
    """

    segment: Segment
    number: int
    config: Config
    backend: Backend
    log: PlanLog

    @cached_property
    def run(self) -> Boxed:
        """Run the segment as captured. Most segments of a deep model never do: they use the code of an equal
        segment."""
        return boxed_calls(self.segment.inputs, self.segment.nodes, self.segment.outputs)

    def interpreted(self, args: list[Any]) -> Sequence[Any]:
        """Compute its outputs as captured. Under a profiler, its nodes get eager's ranges."""
        return self.through(args, self.log.node_ranges) if profiling() else self.run(args)

    def through(self, args: list[Any], around: Around) -> Sequence[Any]:
        """Compute its outputs call by call, each inside the context `around`. Values are freed after their
        last use."""
        values = dict(zip(self.segment.inputs, args, strict=True))
        args.clear()
        nodes = self.segment.nodes
        reads = [(i, (node, *node.all_input_nodes)) for i, node in enumerate(nodes)]
        dying = last_uses([*reads, (len(reads), self.segment.outputs)])
        for i, node in enumerate(nodes):
            with around(node):
                given: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                assert callable(node.target)
                values[node] = node.target(*given[0], **given[1])
                del given
            for value in dying.get(i, ()):
                del values[value]
        return tuple(values[node] for node in self.segment.outputs)

    def reason(self, text: str, way_out: str = _WAY_OUT, code: str = "segment-not-compiled") -> Reason:
        """The reason why it is not compiled."""
        nodes = (node for node in self.segment.nodes if call_of(node).kind is CallKind.NODE)
        names = [*dict.fromkeys(map(call_name, nodes))]
        shown = [*names[:NAMED_NODES], *["..."] * (len(names) > NAMED_NODES)]
        return Reason(code, text, "live.lower", node=", ".join(shown), way_out=way_out)

    def tell(self, how: str, guards: str, because: str, *rest: Any) -> None:
        """Report a lowering. The arguments are those of `LoweringReport`."""
        live_log.debug("segment %d: %s, %s", self.number, how, because)
        self.log.lowered(LoweringReport(self.number, how, guards, because, *rest))


Symbolic = dict[int, frozenset[int]]
#: code, with the values that it takes
Found = tuple[Lowered, list[Any]]


class Lowerer:
    """The lowerings of one function."""

    def __init__(self, fn: SegmentFunction, shared: Lowerings) -> None:
        self._fn, self._shared = fn, shared
        self.lowered: list[Lowered] = []
        self.interpret_because: str | None = None
        self._symbolic: Symbolic = {}
        #: why a function that was to be compiled is interpreted from now on
        self.given_up: Reason | None = None
        #: the call in which the last trace raised; None once a trace succeeds
        self._raised_in: str | None = None

    @without_torch_functions
    def find(self, args: list[Any]) -> Found | None:
        """Find code for these values, or lower the function now. None if the function is to be interpreted.

        Raises:
            LoweringError: the function cannot be compiled, in strict mode; or the compile stance forbids it.
        """
        try:
            modes = ThreadModes.now()
            for lowered in self.lowered:
                if lowered.modes == modes and (flat := lowered.flat(args)) is not None:
                    return lowered, flat
            return self._take_over(args, modes) or self._lower(args)
        except LoweringError:
            raise
        except Refusal as error:
            self.give_up(str(error), error)
        except Exception as error:
            self.give_up(first_line(error), error)
        return None

    def _take_over(self, args: list[Any], modes: ThreadModes) -> Found | None:
        """Find code of an equal function that fits."""
        for lowered in self._shared.codes:
            if lowered.modes == modes and lowered not in self.lowered:
                flat = lowered.flat(args)
                if flat is not None:
                    self.lowered.insert(0, lowered)
                    counters["shared_lowerings"] += 1
                    self._fn.tell(self._fn.backend.name, lowered.guards(), "shared with an equal segment")
                    return lowered, flat
        return None

    def _lower(self, args: list[Any]) -> Found | None:
        """Lower the function for these values. None if it is to be interpreted this time."""
        how = self._fn
        if self._shared.interpret_because is not None:
            self.give_up(self._shared.interpret_because)
            return None
        border, flat = _border(args)
        if any(map(is_not_in_memory, flat)):
            return None
        because = self._note_changes(args, flat, border)
        if len(self.lowered) >= how.config.recompile_limit:
            limit = f"recompile limit of {how.config.recompile_limit} reached: {because}"
            reason = how.reason(limit, "a larger recompile_limit=, or leave dynamic=None", "recompile-limit")
            if how.config.strict:
                raise LoweringError(reason)
            self.stop(limit, reason)
            return None
        if _stance_refuses(how, because):
            return None
        with how.log.lowering(how.number) as seconds:
            lowered = restored_on_error(self._compile, flat, border)
        recompile = bool(self.lowered)
        self.lowered.insert(0, lowered)
        self._shared.codes.insert(0, lowered)
        counters["lowerings"] += 1
        counters["recompiles"] += recompile
        how.tell(how.backend.name, lowered.guards(), because, lowered.graph, recompile, seconds())
        return lowered, flat

    def _note_changes(self, args: list[Any], flat: list[Any], border: SubclassBorder | None) -> str:
        """Make sizes symbolic that differ from the last lowering. Return which guard failed, as text."""
        last, dynamic = self.lowered[0] if self.lowered else None, self._fn.config.dynamic
        if last is None or not _is_alike(last.border, args):
            self._symbolic = _initially_symbolic(dynamic, args, flat)
            return "first use" if last is None else f"another class or metadata: {last.border} / {border}"
        if last.modes != ThreadModes.now():
            return last.modes.difference(ThreadModes.now())
        if dynamic is not False:
            for index, dims in changed_sizes(last.guard.args_metadata, flat).items():
                self._symbolic[index] = self._symbolic.get(index, frozenset()) | dims
        return last.guard.why_not(flat)

    def _compile(self, args: Sequence[Any], border: SubclassBorder | None) -> Lowered:
        self._fn.backend.prepare()  # again: the program may have begun to use a GPU inside the context
        with self._fn.log.stage("trace"):
            recorded = functools.partial(self._fn.through, around=self._recorded)
            run_flat = recorded if border is None else border.flattened(recorded)
            traced = _traced(self._fn, self._symbolic, run_flat, args)
            self._raised_in = None
        graph = copied(traced.gm.graph)  # a backend may rewrite the graph that it receives
        guard = InputGuard(args, traced.fed, traced.example_inputs, traced.shape_env)
        run, pending = _code(self._fn, traced)
        return Lowered(
            guard, ThreadModes.now(), run, traced.fed, traced.given, graph, border, pending=pending
        )

    @contextmanager
    def _recorded(self, node: fx.Node) -> Iterator[None]:
        """Wraps the trace of one call: its ATen nodes carry the name of the autograd node, and if the trace
        raises, we record the call."""
        with self._fn.log.node_recorded(node):
            try:
                yield
            except Exception:
                self._raised_in = call_name(node)
                raise

    def has_code(self, lowered: Lowered) -> bool:
        """Whether the code is ready. If it was compiled in the background and is finished, take it now."""
        pending = lowered.pending
        if pending is not None and is_taken(pending):
            if (error := pending.exception()) is not None:
                self.give_up(first_line(error), error)
            else:
                lowered.run, lowered.pending = pending.result(), None
        return lowered.pending is None

    def stop(self, because: str, reason: Reason | None = None) -> None:
        """Interpret the function from now on."""
        self.interpret_because = because
        self._fn.tell(INTERPRETED, "", because)
        self.given_up = self._shared.reason or reason or self._fn.reason(because)
        tell(self.given_up, INTERPRETED_PART)

    def give_up(self, text: str, error: BaseException | None = None) -> None:
        """Interpret the function from now on, because it cannot be compiled.

        Raises:
            LoweringError: in strict mode.
        """
        reason = self._fn.reason(f"segment {self._fn.number} cannot be compiled: {text}")
        if self._fn.config.strict:
            raise LoweringError(getattr(error, "reason", reason)) from error
        if error is not None and not isinstance(error, Refusal) and live_log.isEnabledFor(logging.INFO):
            # format it as text: a log handler that keeps records must not keep the error's frames alive
            live_log.info("%s\n%s", reason, "".join(traceback.format_exception(error)).rstrip())
        self._shared.interpret_because = text
        self._shared.reason = getattr(error, "reason", self._shared.reason)
        self._shared.raised_in = self._raised_in or self._shared.raised_in
        counters["segments_given_up"] += 1
        self.stop(text)


def _traced(how: SegmentFunction, symbolic: Symbolic, run: Boxed, args: Sequence[Any]) -> Traced:
    decompositions = how.backend.decompositions()
    try:
        return trace(run, args, symbolic or None, decompositions)
    except Refusal as error:
        if error.code != "symbolic-metadata":
            raise
        return trace(run, args, None, decompositions)


def _code(how: SegmentFunction, traced: Traced) -> tuple[Boxed, PendingCode | None]:
    """The backend's code, or a handle for code that is still being compiled.

    In deterministic mode we do not compile in the background, because runs must not differ.
    """
    compile = functools.partial(_compiled, how, traced, bool(ThreadModes.autocast_now()))
    patience = how.config.patience
    if patience is not None and not torch.get_deterministic_debug_mode():
        pending = begin(compile, patience)
        return (pending.result(), None) if is_taken(pending) else (_not_there, pending)
    with how.log.stage("compile"):
        return compile(), None


@without_autocast
def _compiled(how: SegmentFunction, traced: Traced, is_autocast_on: bool) -> Boxed:
    """Compile code that runs without autocast. The guard on modes ensures that autocast is off at run time if
    it was off at compile time."""
    code = compile_fallible(how.backend, traced.gm, traced.example_inputs, strict=how.config.strict)
    return without_autocast(code) if is_autocast_on else code


def _not_there(args: list[Any]) -> Sequence[Any]:
    raise AssertionError("the code of a segment was run before it was there")


def _stance_refuses(how: SegmentFunction, because: str) -> bool:
    """Whether ``torch.compiler.set_stance`` forbids a lowering now, so that the function is interpreted.

    Raises:
        LoweringError: the stance is ``fail_on_recompile``.
    """
    stance = compile_stance()
    if stance == "fail_on_recompile":
        text = f"segment {how.number} has no code for its inputs, under {stance}: {because}"
        raise LoweringError(how.reason(text, "set another stance with torch.compiler.set_stance"))
    return stance == "eager_on_recompile"


def _initially_symbolic(dynamic: bool | None, args: Sequence[Any], flat: Sequence[Any]) -> Symbolic:
    """The sizes that are symbolic from the start, by place among the `flat` values. A size that reaches the
    segment as a number among `args` is one that the engine has seen change, so it is symbolic, and so are
    dimensions of the same extent."""
    if dynamic is False:
        return {}
    moving = {value for value in args if type(value) is int}
    symbolic: Symbolic = {}
    for i, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            symbolic[i] = frozenset(d for d, s in enumerate(value.shape) if dynamic or s in moving)
        elif type(value) is int and (dynamic or value in moving):
            symbolic[i] = frozenset({0})
    return {i: dims for i, dims in symbolic.items() if dims}


def _border(args: list[Any]) -> tuple[SubclassBorder | None, list[Any]]:
    """The border of these values, if they include a tensor subclass, and the flat values behind it."""
    if not any(map(is_wrapper, args)):
        return None, args
    border = SubclassBorder(args)
    flat = border.enter(args)
    assert flat is not None
    return border, flat


def _is_alike(border: SubclassBorder | None, args: list[Any]) -> bool:
    """Whether the values have the classes and metadata that `border` was made for."""
    return not any(map(is_wrapper, args)) if border is None else border.enter(args) is not None
