"""The report of a training step: how its calls ran, which pieces it has, and why.

In: filled in by the step while it runs. Out: read by people, tests and benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from retrograd.errors import Reason
from retrograd.report import Report, process_report


@dataclass(eq=False)
class StepReport:
    """The report of one step.

    Attributes:
        name: of the step.
        eager, compiled: how many calls ran eagerly, and how many compiled.
        pieces: the graphs from Dynamo, the backwards, and what ran as eager runs it.
        left_to_python: what is not traced, because its results would differ from eager's.
        aside: why the step runs eagerly from now on; None if it does not.
    """

    name: str
    eager: int = 0
    compiled: int = 0
    pieces: Report = field(default_factory=lambda: Report(above=process_report))
    left_to_python: set[str] = field(default_factory=set)
    aside: Reason | None = None

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return self.eager + self.compiled

    @property
    def compilations(self) -> int:
        """How many graphs and backwards were captured. While this grows, the step is not steady."""
        lowerings = sum(len(backward.lowerings) for backward in self.pieces.backwards)
        return len(self.pieces.graphs) + len(self.pieces.backwards) + lowerings

    def called(self, is_compiled: bool) -> None:
        """A call begins."""
        if is_compiled:
            self.compiled += 1
        else:
            self.eager += 1

    def __str__(self) -> str:
        parts = [f"step {self.name}: {self.compiled} calls compiled, {self.eager} eager"]
        parts += [f"{what}: runs as it is; traced, it would round otherwise" for what in self.left_to_python]
        parts += [str(self.aside)] if self.aside is not None else []
        return "\n\n".join([*parts, str(self.pieces)])
