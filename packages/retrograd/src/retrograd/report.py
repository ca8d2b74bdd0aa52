"""What was captured, compiled, or run as eager runs it: the answer of every ``explain``.

In: filled in by the stages while they work. Out: read by people, tests and the harness.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from retrograd._torch.log import artifact
from retrograd.errors import FallbackWarning, Reason, first_line
from retrograd.events import AOT_LOGS, LOGS, counters
from retrograd.graph.backward_graph import BackwardGraph, Schedule
from retrograd.graph.render import readable
from retrograd.process import ForkSafeLock, forgotten_by_reset

_lock = ForkSafeLock()

#: how many backwards a report remembers, so that a long process does not grow without end.
KEPT = 200


@dataclass(frozen=True)
class LoweringReport:
    """One lowering of one segment.

    Attributes:
        segment: number of the segment in its schedule.
        how: name of the backend that compiled it, or ``interpreted``.
        guards: what must hold for its reuse.
        because: why it was needed: ``first use``, the guard that failed, or why it could not be compiled.
        graph: the ATen graph; None if the segment is interpreted.
        recompile: whether the segment had a lowering before.
    """

    segment: int
    how: str
    guards: str
    because: str
    graph: fx.Graph | None = None
    recompile: bool = False

    def code(self) -> str:
        """The ATen graph as text."""
        if self.graph is None:
            return ""
        return fx.GraphModule({}, self.graph, f"Segment{self.segment}").print_readable(print_output=False)


@dataclass
class BackwardReport:
    """One captured backward: a structure of the autograd graph, with its eager order.

    `notes` say what runs in another way than the user asked for.
    """

    graph: BackwardGraph
    schedule: Schedule
    backend: str
    lowerings: list[LoweringReport] = field(default_factory=list)
    runs: int = 0
    notes: list[Reason] = field(default_factory=list)

    @property
    def recompiles(self) -> list[LoweringReport]:
        """Lowerings of segments that had one."""
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
        """The captured backward in eager's order, one line per call; also the ATen graphs of its segments."""
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
        forward, backward: how many ATen calls each half has.
        regions: how many autograd nodes stand for it.
        saved_bytes: memory that is held between forward and backward, without inputs and outputs.
        ended_by: why Dynamo ended the graph; empty if the function ended there, or the reason is unknown.
    """

    name: str
    forward: int
    backward: int
    regions: int
    saved_bytes: int
    ended_by: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.forward} calls forward, {self.backward} backward in {self.regions} regions, "
            f"{self.saved_bytes:,} bytes saved"
        )
        return f"{text}\n  ends at  {self.ended_by}" if self.ended_by else text


@dataclass
class Report:
    """What was captured, what ran as eager runs it, and why.

    Attributes:
        backwards: one entry for each structure and order that the live path captured; the last `KEPT`.
        graphs: one entry for each graph that was compiled ahead of time; the last `KEPT`.
        fallbacks: for each reason, how often something ran as eager runs it.
        notes: what was compiled, or runs, in another way than the user asked for.
        above: a larger report, to which everything is passed on.
    """

    backwards: deque[BackwardReport] = field(default_factory=lambda: deque(maxlen=KEPT))
    graphs: deque[GraphReport] = field(default_factory=lambda: deque(maxlen=KEPT))
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    notes: dict[Reason, None] = field(default_factory=dict)
    above: Report | None = field(default=None, repr=False)

    @property
    def recompiles(self) -> list[LoweringReport]:
        """All lowerings of segments that had one."""
        return [lowering for backward in self.backwards for lowering in backward.recompiles]

    def captured(self, backward: BackwardReport) -> None:
        """The live path has captured a backward."""
        for report in self._all():
            report.backwards.append(backward)

    def compiled(self, graph: GraphReport) -> None:
        """A graph was compiled ahead of time."""
        counters["aot_captures"] += 1
        AOT_LOGS["graph"].info("%s", graph)
        for report in self._all():
            report.graphs.append(graph)

    def fell_back(self, reason: Reason, what: str) -> None:
        """Something ran as eager runs it; `what` says so in words. Warns once per code and text."""
        is_live = reason.stage.startswith("live")
        counters["fallbacks" if is_live else "aot_fallbacks"] += 1
        with _lock:
            for report in self._all():
                report.fallbacks[reason] += 1
        if (text := _first(reason, what)) is not None:
            (LOGS if is_live else AOT_LOGS)["recompiles"].info("%s", text)
            warnings.warn(text, FallbackWarning, stacklevel=_users_level())

    def noted(self, reason: Reason, *, warn: bool = True) -> None:
        """Something is compiled, or runs, in another way than the user asked for."""
        is_new = reason not in self.notes
        for report in self._all():
            report.notes.setdefault(reason)
        if is_new and warn and (text := _first(reason, "")) is not None:
            warnings.warn(text, FallbackWarning, stacklevel=_users_level())

    def clear(self) -> None:
        """Forget everything."""
        for entries in (self.backwards, self.graphs, self.fallbacks, self.notes):
            entries.clear()

    def _all(self) -> Iterator[Report]:
        report: Report | None = self
        while report is not None:
            yield report
            report = report.above

    def __str__(self) -> str:
        parts = [str(entry) for entry in (*self.graphs, *self.backwards)] or ["nothing was captured"]
        for reason, count in self.fallbacks.items():
            parts.append(f"ran as eager runs it {count} times [{reason.code}]\n" + _indented(reason))
        parts += [f"runs otherwise than asked [{reason.code}]\n" + _indented(reason) for reason in self.notes]
        return "\n\n".join(parts)

    def print_readable(self, print_output: bool = True) -> str:
        """All graphs of the live path as text; printed unless `print_output` is false."""
        return "\n\n".join(backward.print_readable(print_output) for backward in self.backwards)


#: everything that happened in this process.
process_report = Report()
forgotten_by_reset(process_report.clear)

_warned: set[tuple[str, str]] = set()
forgotten_by_reset(_warned.clear)


def reason_of(error: Exception, stage: str, code: str = "compile-failed") -> Reason:
    """The reason why something that raised `error` in `stage` runs as eager runs it."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, Reason):
        return reason
    return Reason(code, first_line(error), stage)


def _first(reason: Reason, what: str) -> str | None:
    """The text of a warning; None if the same warning was given before."""
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
    """The ``stacklevel`` at which the caller's warning shows the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("retrograd.", "torch.")
    ):
        frame, level = frame.f_back, level + 1
    return level
