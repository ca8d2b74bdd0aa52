"""What the AOT path did in this process.

In: captures and fallbacks as they happen. Out: `AotReport`, readable.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field

from retrograd.errors import FallbackWarning, Reason
from retrograd.events import counters
from retrograd.graph.partition import Partition

__all__ = ["AotReport", "Captured", "explain", "reason_of", "report", "reset"]


@dataclass(frozen=True)
class Captured:
    """One function that was captured and compiled.

    Attributes:
        name: of the function.
        calls: ATen calls in forward and backward.
        regions: how many autograd nodes stand for it.
        saved_bytes: what lives between forward and backward, besides inputs and outputs.
    """

    name: str
    calls: tuple[int, int]
    regions: int
    saved_bytes: int

    @staticmethod
    def of(partition: Partition) -> Captured:
        """The record of a partition."""
        counts = [
            sum(node.op == "call_function" for node in gm.graph.nodes)
            for gm in (partition.forward, *(backward.gm for backward in partition.backwards))
        ]
        name, regions = partition.joint.state.name, len(partition.backwards)
        return Captured(name, (counts[0], sum(counts[1:])), regions, partition.saved_bytes)

    def __str__(self) -> str:
        forward, backward = self.calls
        return (
            f"{self.name}: {forward} calls forward, {backward} backward in {self.regions} regions, "
            f"{self.saved_bytes:,} bytes saved"
        )


@dataclass
class AotReport:
    """All captures and fallbacks.

    Attributes:
        captures: in order.
        fallbacks: by reason, how many calls ran eagerly.
        notes: what was compiled otherwise than asked.
    """

    captures: list[Captured] = field(default_factory=list)
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    notes: list[Reason] = field(default_factory=list)

    def captured(self, partition: Partition) -> None:
        """Note a capture."""
        counters["aot_captures"] += 1
        self.captures.append(Captured.of(partition))

    def fell_back(self, reason: Reason) -> None:
        """Note a call that ran eagerly; warns once per reason."""
        counters["aot_fallbacks"] += 1
        if reason not in self.fallbacks:
            warnings.warn(str(reason), FallbackWarning, stacklevel=4)
        self.fallbacks[reason] += 1

    def noted(self, reason: Reason, warn: bool = True) -> None:
        """Note something that is compiled, or runs, otherwise than asked, and warn; once per reason."""
        if reason in self.notes:
            return
        self.notes.append(reason)
        if warn:
            warnings.warn(str(reason), FallbackWarning, stacklevel=3)

    def clear(self) -> None:
        """Forget everything; warnings are given again."""
        self.captures.clear()
        self.fallbacks.clear()
        self.notes.clear()

    def __str__(self) -> str:
        lines = [str(captured) for captured in self.captures] or ["nothing captured"]
        for reason, count in self.fallbacks.items():
            lines.append(f"ran eagerly {count} times: " + str(reason).replace("\n", "\n  "))
        lines += [str(reason).replace("\n", "\n  ") for reason in self.notes]
        return "\n".join(lines)


report = AotReport()


def reason_of(error: Exception, stage: str) -> Reason:
    """Why something runs eagerly that raised `error` when it was compiled in `stage`."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, Reason):
        return reason
    text = (str(error).strip().splitlines() or [""])[0]
    return Reason("compile-failed", f"{type(error).__name__}: {text}", stage)


def explain() -> AotReport:
    """What was captured in this process, and what ran eagerly and why."""
    return report


def reset() -> None:
    """Forget the report. Compiled functions stay; each has a ``reset`` of its own."""
    report.clear()
