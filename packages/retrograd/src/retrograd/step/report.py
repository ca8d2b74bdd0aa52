"""What became of a step: the answer of ``step.explain()``.

In: filled in by `CompiledStep`. Out: read by people and tests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import fx

from retrograd.errors import Reason
from retrograd.graph.report import Report

__all__ = ["StepReport", "WholeReport"]


@dataclass
class WholeReport:
    """One graph of a whole step.

    Attributes:
        graph: with its writes at the end. because: why it was made. runs: how often it ran.
        backend: that compiled it.
        numbers: paths of the numbers that are its inputs.
    """

    graph: fx.Graph
    because: str
    backend: str
    numbers: tuple[str, ...] = ()
    runs: int = 0

    def __str__(self) -> str:
        calls = sum(node.op == "call_function" for node in self.graph.nodes)
        lines = [
            f"whole step of {calls} calls, run {self.runs} times, backend {self.backend}: {self.because}"
        ]
        if self.numbers:
            lines.append(f"  numbers  {', '.join(self.numbers)}")
        return "\n".join(lines)


@dataclass
class StepReport:
    """How the calls of a step ran.

    Attributes:
        wholes: the graphs that were made.
        eager: how many calls ran eagerly, to let optimizers and modules make what they make at first.
        pieces: how often each reason made a call run in pieces.
        backwards: what became of the backwards of these calls.
    """

    wholes: list[WholeReport] = field(default_factory=list)
    eager: int = 0
    pieces: Counter[Reason] = field(default_factory=Counter)
    backwards: Report = field(default_factory=Report)

    def __str__(self) -> str:
        parts = [str(whole) for whole in self.wholes]
        if self.eager:
            parts.append(f"ran eagerly {self.eager} times, before the first capture")
        for reason, count in self.pieces.items():
            text = str(reason).replace("\n", "\n    ")
            parts.append(f"ran in pieces {count} times [{reason.code}]\n    {text}")
        if self.backwards.backwards:
            parts.append(str(self.backwards))
        return "\n\n".join(parts) or "has not been called"
