"""Reports what was captured and compiled, and what ran eagerly.

In: what the stages did. Out: the report that every ``explain`` returns, for people, tests and the harness:
short as ``str``, long as ``details()``, and as an HTML page.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import fx

from retrograd.errors import FallbackWarning, Reason, first_line
from retrograd.events import AOT_LOGS, LOGS, counters
from retrograd.graph.backward_graph import BackwardGraph, Schedule, Segment, readable
from retrograd.policy import KEPT_REPORTS, SHOWN_IN_SHORT
from retrograd.process import ForkSafeLock, ThreadValue, forgotten_by_reset
from retrograd.progress import working
from retrograd.report_page import page_of
from retrograd.report_text import by_kind, counted, indented, most, short
from retrograd.runtime.callers import users_level, users_line
from retrograd.runtime.profiler import artifact

_lock = ForkSafeLock()

#: The text of a report that was told of nothing.
NOTHING = "nothing was captured: no backward ran here, and no call was compiled"

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
        seconds: how long the backward waited for it.
    """

    segment: int
    how: str
    guards: str
    because: str
    graph: fx.Graph | None = None
    recompile: bool = False
    seconds: float = 0.0

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

    `notes` lists what runs differently from what the user asked for. `line` is the user's line that ran the
    backward when it was planned, such as ``train.py:31``.
    """

    graph: BackwardGraph
    schedule: Schedule
    backend: str
    lowerings: list[LoweringReport] = field(default_factory=list)
    runs: int = 0
    notes: list[Reason] = field(default_factory=list)
    line: str = field(default_factory=users_line)

    @property
    def begins(self) -> str:
        """The node from which it starts, and the line that ran it: ``MeanBackward0 at train.py:31``."""
        names = [call.name.rpartition("::")[2] for call in self.graph.node_calls[1:2]]  # after the GraphRoot
        return " at ".join([*names, *([self.line] if self.line else [])])

    @property
    def recompiles(self) -> list[LoweringReport]:
        """Lowerings of segments that already had one."""
        return [lowering for lowering in self.lowerings if lowering.recompile]

    @property
    def opaque_calls(self) -> Counter[str]:
        """How many opaque calls there are, by their reason."""
        return Counter(step.reason for step in self.schedule.opaque_calls)

    def ways(self) -> Counter[str]:
        """How many segments run in each way, in words."""
        last = {low.segment: low for low in self.lowerings}
        return Counter(self.way(segment, last.get(i)) for i, segment in enumerate(self.schedule.segments))

    def way(self, segment: Segment, last: LoweringReport | None) -> str:
        """How a segment runs, given its last lowering."""
        if last is not None and not last.is_interpreted:
            return "compiled" if last.graph is not None else "with the code of an equal one"
        if last is not None:
            return f"call by call: {last.because}"
        if self.backend == "eager":
            return "call by call, as backend='eager' runs them"
        return "not compiled yet" if segment.worth_compiling else "call by call: too little to compile"

    def equal_lowerings(self) -> dict[tuple[str, str, str], list[int]]:
        """The segments that were lowered alike: by backend, cause and guards."""
        equal: dict[tuple[str, str, str], list[int]] = {}
        for low in self.lowerings:
            equal.setdefault((low.how, low.because, low.guards), []).append(low.segment)
        return equal

    def lines(self, shown: int | None = SHOWN_IN_SHORT) -> tuple[str, ...]:
        """The short text, below its first line, with at most so many kinds of segments and of calls."""
        opaque, recompiles = self.opaque_calls, self.recompiles
        return (
            f"  segments      {by_kind(self.ways(), shown)}",
            *([f"  opaque calls  {by_kind(opaque, shown)}"] if opaque else ()),
            *([f"  recompiles    {len(recompiles)}; last: {recompiles[-1].because}"] if recompiles else ()),
        )

    def __str__(self) -> str:
        return "\n".join([_headline([self]), *self.lines()])

    def details(self) -> str:
        """The long text: each lowering with its cause and guards. Equal lowerings share a line."""
        lines = [_headline([self], self.begins), *self.lines(None), f"  lowerings     {len(self.lowerings)}"]
        for (how, because, guards), segments in self.equal_lowerings().items():
            lines.append(f"    segment {', '.join(map(str, segments))}: {how}, {because}")
            lines += [f"      guards  {guards}"] if guards else []
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


def _headline(them: list[BackwardReport], begins: str = "") -> str:
    """The first line of the text of equal backwards."""
    what = "backward" if len(them) == 1 else f"{len(them)} backwards"
    nodes, runs = len(them[0].graph.node_calls), sum(entry.runs for entry in them)
    of = f"{counted(nodes, 'node')} from {begins}" if begins else counted(nodes, "node")
    return f"{what} of {of}, run {counted(runs, 'time')}, backend {them[0].backend}"


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
        text = f"{self.name}: {counted(self.forward, 'call')} forward, "
        if self.regions:
            nodes = counted(self.regions, "autograd node")
            text += f"{self.backward} backward in {nodes}, {self.saved_bytes:,} bytes saved"
        else:
            text += "nothing to differentiate"
        return f"{text}; ends at {self.ended_by}" if self.ended_by else text


@dataclass
class Report:
    """What was captured, what ran eagerly, and why.

    Attributes:
        backwards: one entry for each structure and order that the live path captured; only the latest.
        graphs: one entry for each graph that was compiled ahead of time; only the latest.
        fallbacks: for each reason, how often something ran eagerly.
        notes: what was compiled, or runs, differently from what the user asked for.
        seconds: how long Dynamo and the stages took ahead of time. `compile_seconds` adds the lowerings.
        above: a larger report that receives everything too.
    """

    backwards: deque[BackwardReport] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    graphs: deque[GraphReport] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    notes: dict[Reason, None] = field(default_factory=dict)
    seconds: float = 0.0
    above: Report | None = field(default=None, repr=False)

    @property
    def compile_seconds(self) -> float:
        """How long the program has waited for compilations."""
        return self.seconds + sum(low.seconds for backward in self.backwards for low in backward.lowerings)

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

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Inside, this thread compiles `what`. Adds the time, unless a block around this one does."""
        with working(what) as seconds:
            yield
        for report in self._all():
            report.seconds += seconds()

    def fell_back(self, reason: Reason, what: str) -> None:
        """Something ran eagerly; `what` describes it. Warns once per code and text. Code may be shared, so we
        also tell the callable that is running."""
        is_live = reason.stage.startswith("live")
        if reason.stage != "live.lower":  # segments are counted where their compilation is given up
            counters["fallbacks" if is_live else "aot_fallbacks"] += 1
        with _lock:
            for report in {id(one): one for one in (*self._all(), *running.get()._all())}.values():
                report.fallbacks[reason] += 1
        if (text := _first(reason, what)) is not None:
            (LOGS if is_live else AOT_LOGS)["recompiles"].info("%s", text)
            warnings.warn(text, FallbackWarning, stacklevel=users_level())

    def recorded(self, reason: Reason, *, warn: bool = True) -> None:
        """Something is compiled, or runs, differently from what the user asked for."""
        is_new = reason not in self.notes
        for report in self._all():
            report.notes.setdefault(reason)
        if is_new and warn and (text := _first(reason, "")) is not None:
            warnings.warn(text, FallbackWarning, stacklevel=users_level())

    def __reduce__(self) -> Any:
        """References to the process-wide report are copied and pickled as references, by its name. A copy of
        another report, which a compiled callable takes along, is empty."""
        return "process_report" if self is process_report else (partial(Report, above=self.above), ())

    def clear(self) -> None:
        """Remove all entries."""
        for entries in (self.backwards, self.graphs, self.fallbacks, self.notes):
            entries.clear()
        self.seconds = 0.0

    def _all(self) -> Iterator[Report]:
        report: Report | None = self
        while report is not None:
            yield report
            report = report.above

    def __str__(self) -> str:
        parts = [*most(map(str, self._graphs), "graph")]
        kinds = self._kinds()  # a single one needs no name
        texts = ((_headline(them, begins if len(kinds) > 1 else ""), *lines) for begins, lines, them in kinds)
        parts += most(map("\n".join, texts), "backward")
        if not parts:
            is_idle = not (self.fallbacks or self.notes)
            parts = [NOTHING if is_idle else "nothing was captured"]
        elif not self.fallbacks:
            parts.append("nothing fell back to eager")
        if (seconds := self.compile_seconds) >= 0.05:
            parts.append(f"compiling took {seconds:.1f} s")
        parts += most(
            (
                f"ran as eager runs it {counted(count, 'time')} {short(reason)}"
                for reason, count in self.fallbacks.most_common()
            ),
            "reason",
        )
        notes = [short(reason, between="; ") for reason in self.all_notes]
        return "\n".join([*parts, *(["notes, no failures:"] if notes else []), *most(notes, "note")])

    def details(self) -> str:
        """The long text: every graph, every backward with its lowerings and guards, every reason."""
        parts = [*map(str, self._graphs), *(entry.details() for entry in self.backwards)]
        for reason, count in self.fallbacks.items():
            parts.append(f"ran as eager runs it {counted(count, 'time')} [{reason.code}]\n{indented(reason)}")
        parts += [f"note, no failure [{reason.code}]\n{indented(reason)}" for reason in self.notes]
        return "\n\n".join(parts or [NOTHING])

    @property
    def _graphs(self) -> list[GraphReport]:
        return [graph for graph in self.graphs if graph.forward or graph.ended_by]

    @property
    def all_notes(self) -> dict[Reason, None]:
        """The notes, and those of the backwards."""
        return {**self.notes, **dict.fromkeys(note for entry in self.backwards for note in entry.notes)}

    def _kinds(self) -> list[tuple[str, tuple[str, ...], list[BackwardReport]]]:
        """The backwards, grouped by what their texts say: where they begin, and their short texts."""
        kinds: dict[Any, list[BackwardReport]] = {}
        for entry in self.backwards:
            key = len(entry.graph.node_calls), entry.backend, entry.begins, entry.lines()
            kinds.setdefault(key, []).append(entry)
        return [(begins, lines, them) for (_, _, begins, lines), them in kinds.items()]

    def _repr_html_(self) -> str:
        """The page of `save_html`, for notebooks."""
        return page_of(self, whole=False)

    def save_html(self, path: str | PathLike[str]) -> None:
        """Write the report as one HTML page: what ran where, and the steps of each captured backward.

        Args:
            path: of the file, which is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(page_of(self), encoding="utf-8")

    def print_readable(self, print_output: bool = True) -> str:
        """All graphs of the live path as text; printed unless `print_output` is false."""
        return "\n\n".join(backward.print_readable(print_output) for backward in self.backwards)


#: Everything that happened in this process.
process_report = Report()
forgotten_by_reset(process_report.clear)


#: where this thread puts its fallbacks; None if they are reported at once
_heard: ThreadValue[list[tuple[Reason, str]] | None] = ThreadValue(None)

#: the report of the compiled callable that this thread is running; else the process-wide one
running = ThreadValue(process_report)

#: for whom Dynamo compiles on this thread
_compiling = ThreadValue(process_report)


@contextmanager
def told_to(report: Report) -> Iterator[None]:
    """Inside, fallbacks on this thread go to `report`. If the block raises, they are dropped: an error in the
    user's program is not a fallback."""
    heard: list[tuple[Reason, str]] = []
    with _heard.switched(heard):
        yield
    for reason, what in heard:
        report.fell_back(reason, what)


def compiling_for(report: Report) -> AbstractContextManager[None]:
    """Inside, `compiler_report` is `report`: Dynamo calls a backend without saying for whom."""
    return _compiling.switched(report)


def compiler_report() -> Report:
    """The report of the callable for which Dynamo compiles on this thread; else the process-wide one."""
    return _compiling.get()


def tell(reason: Reason, what: str) -> None:
    """Something ran eagerly on this thread. Report it to the innermost `told_to` block, or process-wide."""
    heard = _heard.get()
    if heard is None:
        process_report.fell_back(reason, what)
    else:
        heard.append((reason, what))


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
