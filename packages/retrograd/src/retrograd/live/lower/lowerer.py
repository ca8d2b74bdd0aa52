"""Lower one segment, and lower it again when its guards fail.

In: a segment, as a function over a list of values, and the values that arrive. Out: a `Lowered` that
fits them, which gives its outputs; or the reason why the segment is interpreted.
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
from retrograd.graph.backward_graph import Segment, call_name
from retrograd.graph.emit import boxed_calls, last_uses
from retrograd.graph.fx import copied
from retrograd.process import cached_property, restored_on_error
from retrograd.report import INTERPRETED, LoweringReport, PlanLog, tell
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
    """One lowering: code, and what must hold for its use.

    Attributes:
        guard, modes: must hold. run: the backend's code, which takes the arguments at `fed` and whose results
            stand at `given`. graph: the ATen graph. border: flattens tensor subclasses, if there are any.
        has_run: whether it has run. is_deterministic: whether eager has run in its place, and had no error to
            raise about an operation that is not deterministic.
        later: the code, while it is compiled in the background.
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
        """What must hold, for the report."""
        return str(self.guard) if self.border is None else f"{self.border}; {self.guard}"

    def flat(self, args: list[Any]) -> list[Any] | None:
        """The values that its code takes, if `args` fit; None if they do not."""
        flat = args if self.border is None else self.border.enter(args)
        return flat if flat is not None and self.guard.check(flat) else None

    @without_torch_functions
    def __call__(self, args: list[Any], flat: list[Any], run: Boxed) -> list[Any]:
        """The outputs, computed by `run`, which is its code, perhaps recorded; both lists are emptied."""
        passed = {} if self.border is None else self.border.passed_through(args)
        inputs = [flat[i] for i in self.fed]
        args.clear()
        flat.clear()
        results = run(inputs)
        outputs = [None if place is None else results[place] for place in self.given]
        return outputs if self.border is None else self.border.exit(outputs, passed)


@dataclass(eq=False)
class Lowerings:
    """The results of lowering one function, for all that run the same one.

    Attributes:
        codes: the newest first.
        interpret_because: why it cannot be lowered; None if it could be, or has not been tried.
        raised_in: the name of the call that could not be traced; None if there is none.
        reason: why it cannot be lowered, if the backend has said so in full.
    """

    codes: list[Lowered] = field(default_factory=list)
    interpret_because: str | None = None
    raised_in: str | None = None
    reason: Reason | None = None


#: what falls back, in words.
INTERPRETED_PART = "a part of a backward was interpreted"

_WAY_OUT = "name the node in opaque=, or do nothing: outside strict mode, only this segment is not compiled"

Around = Callable[[fx.Node], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class SegmentFunction:
    """A segment as a function of a list of values, which it empties, and how it is lowered.

    Attributes:
        segment: its calls. number: its place among the segments of its schedule.
        config, backend: how to lower it.
        log: is told every lowering.
    """

    segment: Segment
    number: int
    config: Config
    backend: Backend
    log: PlanLog

    @cached_property
    def run(self) -> Boxed:
        """The segment as captured. Most segments of a deep model never run so: they run the code of an equal
        one."""
        return boxed_calls(self.segment.inputs, self.segment.nodes, self.segment.outputs)

    def interpreted(self, args: list[Any]) -> Sequence[Any]:
        """Its outputs, computed as captured; under a profiler its nodes get eager's ranges."""
        return self.through(args, self.log.node_ranges) if profiling() else self.run(args)

    def through(self, args: list[Any], around: Around) -> Sequence[Any]:
        """Its outputs, computed call by call inside `around`; values are let go after their last use."""
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
        """Why it is not compiled."""
        names = map(call_name, self.segment.nodes[:3])
        return Reason(code, text, "live.lower", node=", ".join(names), way_out=way_out)

    def tell(
        self, how: str, guards: str, because: str, graph: fx.Graph | None = None, recompile: bool = False
    ) -> None:
        """Report a lowering. The arguments are those of `LoweringReport`."""
        live_log.debug("segment %d: %s, %s", self.number, how, because)
        self.log.lowered(LoweringReport(self.number, how, guards, because, graph, recompile))


Symbolic = dict[int, frozenset[int]]
#: code, and the values that it takes.
Found = tuple[Lowered, list[Any]]


class Lowerer:
    """The lowerings of one function."""

    def __init__(self, fn: SegmentFunction, shared: Lowerings) -> None:
        self._fn, self._shared = fn, shared
        self.lowered: list[Lowered] = []
        self.interpret_because: str | None = None
        self._symbolic: Symbolic = {}
        #: why the function, which was to be compiled, is interpreted from now on.
        self.given_up: Reason | None = None
        #: the call in which a trace has raised, until one succeeds.
        self._raised_in: str | None = None

    @without_torch_functions
    def find(self, args: list[Any]) -> Found | None:
        """Code for these values, made now if need be; None if the function is to be interpreted."""
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
        """Code that was made for an equal function, if it fits."""
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
        """A new lowering for these values; None if the function is to be interpreted this time."""
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
        lowered = restored_on_error(self._compile, flat, border)
        recompile = bool(self.lowered)
        self.lowered.insert(0, lowered)
        self._shared.codes.insert(0, lowered)
        counters["lowerings"] += 1
        counters["recompiles"] += recompile
        how.tell(how.backend.name, lowered.guards(), because, lowered.graph, recompile)
        return lowered, flat

    def _note_changes(self, args: list[Any], flat: list[Any], border: SubclassBorder | None) -> str:
        """Sizes that differ from the last lowering become symbolic; says what failed."""
        last, dynamic = self.lowered[0] if self.lowered else None, self._fn.config.dynamic
        if last is None or not _is_alike(last.border, args):
            self._symbolic = _initially_symbolic(dynamic, flat, border.numbers if border else frozenset())
            return "first use" if last is None else f"another class or metadata: {last.border} / {border}"
        if last.modes != ThreadModes.now():
            return last.modes.difference(ThreadModes.now())
        if dynamic is not False:
            for index, dims in changed_sizes(last.guard.args_metadata, flat).items():
                self._symbolic[index] = self._symbolic.get(index, frozenset()) | dims
        return last.guard.why_not(flat)

    def _compile(self, args: Sequence[Any], border: SubclassBorder | None) -> Lowered:
        with self._fn.log.stage("trace"):
            recorded = functools.partial(self._fn.through, around=self._recorded)
            run_flat = recorded if border is None else border.flattened(recorded)
            traced = _traced(self._fn, self._symbolic, run_flat, args)
            self._raised_in = None
        graph = copied(traced.gm.graph)  # a backend may rewrite the one that it is given
        guard = InputGuard(args, traced.fed, traced.example_inputs, traced.shape_env)
        run, pending = _code(self._fn, traced)
        return Lowered(
            guard, ThreadModes.now(), run, traced.fed, traced.given, graph, border, pending=pending
        )

    @contextmanager
    def _recorded(self, node: fx.Node) -> Iterator[None]:
        """Around the tracing of a call: its ATen nodes name the autograd node; if it raises, it is known."""
        with self._fn.log.node_recorded(node):
            try:
                yield
            except Exception:
                self._raised_in = call_name(node)
                raise

    @property
    def is_static(self) -> bool:
        """Whether the function was lowered last with every size fixed."""
        return bool(self.lowered) and self.lowered[0].guard.is_static

    def has_code(self, lowered: Lowered) -> bool:
        """Whether the code is there, also if it was to be compiled in the background."""
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
        """The function cannot be compiled: interpret it from now on, or raise in strict mode."""
        reason = self._fn.reason(f"segment {self._fn.number} cannot be compiled: {text}")
        if self._fn.config.strict:
            raise LoweringError(reason) from error
        if error is not None and not isinstance(error, Refusal) and live_log.isEnabledFor(logging.INFO):
            # as text: whoever keeps a record of the log must not keep the frames of the error
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
    """The backend's code, or the promise of it.

    Code is not compiled in the background where determinism is asked for, because runs must not differ.
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
    """Code that runs without autocast. The guard of modes sees to it that none is on where none was."""
    code = compile_fallible(how.backend, traced.gm, traced.example_inputs, strict=how.config.strict)
    return without_autocast(code) if is_autocast_on else code


def _not_there(args: list[Any]) -> Sequence[Any]:
    raise AssertionError("the code of a segment was run before it was there")


def _stance_refuses(how: SegmentFunction, because: str) -> bool:
    """Whether ``torch.compiler.set_stance`` has this function interpreted this time."""
    stance = compile_stance()
    if stance == "fail_on_recompile":
        text = f"segment {how.number} has no code for its inputs, under {stance}: {because}"
        raise LoweringError(how.reason(text, "set another stance with torch.compiler.set_stance"))
    return stance == "eager_on_recompile"


def _initially_symbolic(dynamic: bool | None, args: Sequence[Any], outer: frozenset[int]) -> Symbolic:
    """Sizes that reach the segment as numbers are those that the engine saw change. They are symbolic from
    the start, and so are dimensions of the same extent. `outer` are the numbers of subclass tensors."""
    if dynamic is False:
        return {}
    moving = {value for i, value in enumerate(args) if type(value) is int and i not in outer}
    symbolic: Symbolic = {}
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            symbolic[i] = frozenset(d for d, s in enumerate(value.shape) if dynamic or s in moving)
        elif type(value) is int and (i not in outer or dynamic or value in moving):
            symbolic[i] = frozenset({0})
    return {i: dims for i, dims in symbolic.items() if dims}


def _border(args: list[Any]) -> tuple[SubclassBorder | None, list[Any]]:
    """The border of these values, if there is a subclass among them, and the flat values behind it."""
    if not any(map(is_wrapper, args)):
        return None, args
    border = SubclassBorder(args)
    flat = border.enter(args)
    assert flat is not None
    return border, flat


def _is_alike(border: SubclassBorder | None, args: list[Any]) -> bool:
    """Whether the values have the classes and metadata of those that `border` was made for."""
    return not any(map(is_wrapper, args)) if border is None else border.enter(args) is not None
