"""What the live path did, as values that can be printed: the answer of ``retrograd.explain``.

In: filled in by the stages while they work. Out: read by people, tests and the harness.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from torch import fx

from retrograd.errors import Reason
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.graph.render import readable
from retrograd.graph.schedule import Schedule

__all__ = ["BackwardReport", "LoweringReport", "Report"]

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
    """One captured backward: a structure of the autograd graph together with its eager order.

    `notes` say what runs otherwise than asked.
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


@dataclass
class Report:
    """What was captured and what was not.

    Attributes:
        backwards: one entry per captured structure and order; the last `KEPT` of them.
        fallbacks: how often each reason sent a backward to the stock engine.
    """

    backwards: deque[BackwardReport] = field(default_factory=lambda: deque(maxlen=KEPT))
    fallbacks: Counter[Reason] = field(default_factory=Counter)

    @property
    def recompiles(self) -> list[LoweringReport]:
        """All lowerings of segments that had one."""
        return [lowering for backward in self.backwards for lowering in backward.recompiles]

    def __str__(self) -> str:
        parts = [str(backward) for backward in self.backwards] or ["nothing was captured"]
        for reason, count in self.fallbacks.items():
            text = str(reason).replace("\n", "\n    ")
            parts.append(f"ran on the stock engine {count} times [{reason.code}]\n    {text}")
        return "\n\n".join(parts)

    def print_readable(self, print_output: bool = True) -> str:
        """All graphs as text; printed unless `print_output` is false."""
        return "\n\n".join(backward.print_readable(print_output) for backward in self.backwards)
