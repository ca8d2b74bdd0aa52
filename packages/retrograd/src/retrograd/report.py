"""Reports and logs what was captured and compiled, and what ran eagerly.

In: what the stages did. Out: the report that every ``explain`` returns, for people, tests and the harness.
For each captured backward also records in the loggers below ``retrograd.live``, and artifacts and events in
torch's structured trace, under one compile id. A text is built only if a log or trace is on.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from retrograd.errors import FallbackWarning, Reason, first_line
from retrograd.events import AOT_LOGS, LOGS, counters, live_log
from retrograd.graph.backward_graph import (
    Accumulation,
    BackwardGraph,
    CallKind,
    NodeCall,
    OpaqueCall,
    Schedule,
    Segment,
    call_of,
    readable,
    readable_schedule,
)
from retrograd.policy import KEPT_REPORTS
from retrograd.process import ForkSafeLock, cached_property, forgotten_by_reset, restore_after_errors
from retrograd.runtime.profiler import (
    CompileId,
    artifact,
    compiling,
    event,
    new_compile_id,
    node_range,
    text_range,
)
from retrograd.trace import recorded

_lock = ForkSafeLock()


#: `LoweringReport.how` of a segment without code.
INTERPRETED = "interpreted"


@dataclass(frozen=True)
class LoweringReport:
    """One lowering of one segment.

    Attributes:
        segment: number of the segment in its schedule.
        how: name of the backend that compiled it, or ``interpreted``.
        guards: the conditions for its reuse.
        because: why it was needed: ``first use``, the guard that failed, or why it could not be compiled.
        graph: the ATen graph; None if the segment is interpreted or runs code from an earlier lowering.
        recompile: whether the segment had a lowering before.
    """

    segment: int
    how: str
    guards: str
    because: str
    graph: fx.Graph | None = None
    recompile: bool = False

    @property
    def is_interpreted(self) -> bool:
        """Whether the segment has no code."""
        return self.how == INTERPRETED

    def code(self) -> str:
        """The ATen graph as text."""
        if self.graph is None:
            return ""
        return fx.GraphModule({}, self.graph, f"Segment{self.segment}").print_readable(print_output=False)


@dataclass
class BackwardReport:
    """One captured backward: a structure of the autograd graph, with its eager order.

    `notes` lists what runs differently from what the user asked for.
    """

    graph: BackwardGraph
    schedule: Schedule
    backend: str
    lowerings: list[LoweringReport] = field(default_factory=list)
    runs: int = 0
    notes: list[Reason] = field(default_factory=list)

    @property
    def recompiles(self) -> list[LoweringReport]:
        """Lowerings of segments that already had one."""
        return [lowering for lowering in self.lowerings if lowering.recompile]

    def __str__(self) -> str:
        opaque = Counter(step.reason for step in self.schedule.opaque_calls)
        lines = [
            f"backward of {len(self.graph.node_calls)} node calls, run {self.runs} times, "
            f"backend {self.backend}",
            f"  segments       {len(self.schedule.segments)}",
            f"  opaque calls   {sum(opaque.values())}",
            *(f"    {count:4d} x {reason}" for reason, count in opaque.items()),
            f"  lowerings      {len(self.lowerings)}",
        ]
        for low in self.lowerings:
            lines.append(f"    segment {low.segment}: {low.how}, {low.because}")
            lines.append(f"      guards  {low.guards}")
        lines += [f"  note  {reason.text}" for reason in self.notes]
        return "\n".join(lines)

    def print_readable(self, print_output: bool = True) -> str:
        """The captured backward in eager's order, one line per call, and the ATen graphs of its segments."""
        parts = [readable(self.graph)]
        parts += [f"# segment {low.segment}, {low.how}\n{low.code()}" for low in self.lowerings if low.graph]
        text = "\n\n".join(parts)
        if print_output:
            print(text)  # noqa: T201 - printing is what it is for
        return text


@dataclass(frozen=True)
class GraphReport:
    """One function, or one graph of Dynamo's, that was captured ahead of time and compiled.

    Attributes:
        name: of the function.
        forward, backward: the number of ATen calls in each graph.
        regions: the number of autograd nodes that represent it.
        saved_bytes: memory held between forward and backward, without inputs and outputs.
        ended_by: why Dynamo ended the graph; empty if the function ended there, or the reason is unknown.
    """

    name: str
    forward: int
    backward: int
    regions: int
    saved_bytes: int
    ended_by: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: {self.forward} calls forward, "
        if self.regions:
            text += f"{self.backward} backward in {self.regions} regions, {self.saved_bytes:,} bytes saved"
        else:
            text += "nothing to differentiate"
        return f"{text}\n  ends at  {self.ended_by}" if self.ended_by else text


@dataclass
class Report:
    """What was captured, what ran eagerly, and why.

    Attributes:
        backwards: one entry for each structure and order that the live path captured; only the latest.
        graphs: one entry for each graph that was compiled ahead of time; only the latest.
        fallbacks: for each reason, how often something ran eagerly.
        notes: what was compiled, or runs, differently from what the user asked for.
        above: a larger report that receives everything too.
    """

    backwards: deque[BackwardReport] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    graphs: deque[GraphReport] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    notes: dict[Reason, None] = field(default_factory=dict)
    above: Report | None = field(default=None, repr=False)

    @property
    def recompiles(self) -> list[LoweringReport]:
        """All lowerings of segments that already had one."""
        return [lowering for backward in self.backwards for lowering in backward.recompiles]

    def captured(self, backward: BackwardReport) -> BackwardReport:
        """The live path runs a backward in this context for the first time. Returns the entry that counts its
        runs here. In the process-wide report all contexts share one entry, `backward` itself."""
        own = replace(backward, runs=0) if self.above is not None else backward
        for report in self._all():
            entry = own if report.above is not None else backward
            if not any(known is entry for known in report.backwards):
                report.backwards.append(entry)
        return own

    def compiled(self, graph: GraphReport) -> None:
        """A graph was compiled ahead of time."""
        counters["aot_captures"] += 1
        AOT_LOGS["graph"].info("%s", graph)
        for report in self._all():
            report.graphs.append(graph)

    def fell_back(self, reason: Reason, what: str) -> None:
        """Something ran eagerly; `what` describes it. Warns once per code and text."""
        is_live = reason.stage.startswith("live")
        if reason.stage != "live.lower":  # segments are counted where their compilation is given up
            counters["fallbacks" if is_live else "aot_fallbacks"] += 1
        with _lock:
            for report in self._all():
                report.fallbacks[reason] += 1
        if (text := _first(reason, what)) is not None:
            (LOGS if is_live else AOT_LOGS)["recompiles"].info("%s", text)
            warnings.warn(text, FallbackWarning, stacklevel=_users_level())

    def recorded(self, reason: Reason, *, warn: bool = True) -> None:
        """Something is compiled, or runs, differently from what the user asked for."""
        is_new = reason not in self.notes
        for report in self._all():
            report.notes.setdefault(reason)
        if is_new and warn and (text := _first(reason, "")) is not None:
            warnings.warn(text, FallbackWarning, stacklevel=_users_level())

    def __reduce__(self) -> Any:
        """References to the process-wide report are copied and pickled as references, by its name."""
        return "process_report" if self is process_report else super().__reduce__()

    def clear(self) -> None:
        """Remove all entries."""
        for entries in (self.backwards, self.graphs, self.fallbacks, self.notes):
            entries.clear()

    def _all(self) -> Iterator[Report]:
        report: Report | None = self
        while report is not None:
            yield report
            report = report.above

    def __str__(self) -> str:
        graphs = [graph for graph in self.graphs if graph.forward or graph.ended_by]
        parts = [str(entry) for entry in (*graphs, *self.backwards)] or ["nothing was captured"]
        for reason, count in self.fallbacks.items():
            parts.append(f"ran as eager runs it {count} times [{reason.code}]\n" + _indented(reason))
        parts += [f"runs otherwise than asked [{reason.code}]\n" + _indented(reason) for reason in self.notes]
        return "\n\n".join(parts)

    def print_readable(self, print_output: bool = True) -> str:
        """All graphs of the live path as text; printed unless `print_output` is false."""
        return "\n\n".join(backward.print_readable(print_output) for backward in self.backwards)


#: Everything that happened in this process.
process_report = Report()
forgotten_by_reset(process_report.clear)


class _Here(threading.local):
    """Lists of the fallbacks that happen on this thread, innermost last."""

    def __init__(self) -> None:
        self.lists: list[list[tuple[Reason, str]]] = []


_here = _Here()


def _put_lists_back(count: int) -> None:
    del _here.lists[count:]


restore_after_errors(lambda: len(_here.lists), _put_lists_back)


class told_to:
    """Inside, fallbacks on this thread go to `report`. If the block raises, they are dropped: an error in the
    user's program is not a fallback."""

    __slots__ = ("_heard", "_report")

    def __init__(self, report: Report) -> None:
        self._report = report
        self._heard: list[tuple[Reason, str]] = []

    def __enter__(self) -> None:
        _here.lists.append(self._heard)

    def __exit__(self, error: object, *_: object) -> None:
        _here.lists[:] = [one for one in _here.lists if one is not self._heard]
        for reason, what in self._heard if error is None else ():
            self._report.fell_back(reason, what)


def tell(reason: Reason, what: str) -> None:
    """Something ran eagerly on this thread. Report it to the innermost `told_to` block, or process-wide."""
    if _here.lists:
        _here.lists[-1].append((reason, what))
    else:
        process_report.fell_back(reason, what)


_warned: set[tuple[str, str]] = set()
forgotten_by_reset(_warned.clear)


def reason_of(error: Exception, stage: str, code: str = "compile-failed") -> Reason:
    """The reason why something that raised `error` in `stage` runs eagerly."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, Reason):
        return reason
    return Reason(code, first_line(error), stage, way_out="strict=True raises this, with its traceback")


def why_failed(what: str, error: BaseException, stage: str) -> Reason:
    """The reason to run something eagerly that raised where eager does not. Also counts the failure."""
    counters["run_failures"] += 1
    return Reason(
        "code-failed",
        f"{what} raised {first_line(error)}",
        stage,
        way_out="this is a fault of the backend: another backend may have the operator",
    )


def _first(reason: Reason, what: str) -> str | None:
    """The text of a warning; None if the same warning was already given."""
    key = (reason.code, reason.text)
    with _lock:
        if key in _warned:
            return None
        _warned.add(key)
    text = f"{what}: {reason}" if what else str(reason)
    artifact("retrograd_fallback", lambda: text)
    return text


def _indented(reason: Reason) -> str:
    return "    " + str(reason).replace("\n", "\n    ")


def _users_level() -> int:
    """The ``stacklevel`` with which a warning from the caller shows the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("retrograd.", "torch.")
    ):
        frame, level = frame.f_back, level + 1
    return level


#: The format in which `forward_line` writes a line of the user's code.
_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)  (?P<code>.*)")

_HAS_RANGE = {CallKind.NODE, CallKind.CPP_FUNCTION, CallKind.FUNCTION, CallKind.ACCUMULATE}


class PlanLog:
    """Logs and traces one backward."""

    def __init__(self, report: BackwardReport) -> None:
        self._report = report

    @cached_property
    def compile_id(self) -> CompileId:
        """The id under which torch's structured trace files this backward."""
        return new_compile_id()

    # logs and artifacts

    def laid_out(self) -> None:
        """The plan has been made."""
        graph, schedule = self._report.graph, self._report.schedule
        self._tell("graph", "retrograd_backward_graph", lambda: readable(graph))
        self._tell("schedule", "retrograd_hook_schedule", lambda: readable_schedule(graph, schedule))

    def lowered(self, lowering: LoweringReport) -> None:
        """A segment was compiled, or its compilation was given up."""
        self._report.lowerings.append(lowering)
        segment, name = f"segment {lowering.segment}", f"retrograd_segment_{lowering.segment}"
        if lowering.graph is not None:
            artifact(f"{name}_graph", lowering.code, self.compile_id)
            self._tell("guards", f"{name}_guards", lambda: f"{segment}: {lowering.guards}")
        if lowering.recompile:
            text = f"{segment} is lowered again: {lowering.because}"
            self._tell("recompiles", f"{name}_recompile_reason", lambda: text, logging.INFO)
        elif lowering.is_interpreted:
            text = f"{segment} is interpreted: {lowering.because}"
            self._tell("recompiles", f"{name}_interpreted", lambda: text, logging.INFO)

    def recorded(self, reason: Reason) -> None:
        """Something runs differently from what the user asked for."""
        if reason not in self._report.notes:
            self._report.notes.append(reason)
            live_log.info("backward %s: %s", self.compile_id, reason)

    def _tell(self, log: str, name: str, text: Callable[[], str], level: int = logging.DEBUG) -> None:
        if LOGS[log].isEnabledFor(level):
            LOGS[log].log(level, "backward %s\n%s", self.compile_id, text())
        artifact(name, text, self.compile_id)

    # spans

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Use this around a stage of lowering: torch then files its records under this backward."""
        with compiling(self.compile_id), event(f"retrograd.{name}", self.compile_id):
            yield

    def node_recorded(self, node: fx.Node) -> AbstractContextManager[None]:
        """Use this around the tracing of `node`: its ATen nodes then name its autograd node and source
        line."""
        name = self._report.graph.node_name(call_of(node).node_call)
        note: dict[str, Any] = {"custom": {"autograd_node": name}}
        if found := _LINE.fullmatch(_node_call(self._report, node).source):
            place = f'  File "{found["file"]}", line {found["line"]}, in forward'
            note["stack_trace"] = f"{place}\n    {found['code']}\n"
        return recorded(**note)

    # profiler ranges

    def node_ranges(self, node: fx.Node) -> AbstractContextManager[None]:
        """Use this around one call of an interpreted segment: eager's ranges, if the call is a node."""
        if call_of(node).kind not in _HAS_RANGE:
            return nullcontext()
        return node_range(_node_call(self._report, node).name)

    def step_range(self, step: OpaqueCall | Accumulation) -> AbstractContextManager[None]:
        """Use this around an opaque call or an accumulation: eager's ranges for a node, else a
        description."""
        name = _node_call(self._report, step.node).name
        if isinstance(step, Accumulation) or call_of(step.node).kind in _HAS_RANGE:
            return node_range(name)
        return text_range(f"{step.reason} of {name}")

    def segment_range(self, segment: Segment, number: int) -> AbstractContextManager[None]:
        """Use this around a compiled segment: one range with the names of its nodes."""
        names = [
            _node_call(self._report, node).name for node in segment.nodes if call_of(node).kind in _HAS_RANGE
        ]
        shown = ", ".join(names[:8]) + (f", … ({len(names)} nodes)" if len(names) > 8 else "")
        return text_range(f"retrograd segment {number}: {shown}")


def _node_call(report: BackwardReport, node: fx.Node) -> NodeCall:
    return report.graph.node_calls[call_of(node).node_call]
