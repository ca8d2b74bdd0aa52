"""The phrases of which a report's texts consist.

In: reasons, counts and texts. Out: lines for people, so few that a report stays on one screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from retrograd.errors import Reason
from retrograd.policy import SHOWN_IN_SHORT


def counted(number: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def indented(reason: Reason) -> str:
    """All of a reason, indented."""
    return "    " + str(reason).replace("\n", "\n    ")


def short(reason: Reason, between: str = "\n    ") -> str:
    """A reason in two lines: its code, its text, and the way out; or in one, with other text `between`."""
    node = f" ({reason.node})" if reason.node else ""
    way_out = reason.way_out if reason.asks_nothing else f"try {reason.way_out}"
    return f"[{reason.code}] {reason.text}{node}" + (between + way_out if reason.way_out else "")


def by_kind(kinds: Counter[str], shown: int | None) -> str:
    """A total and its first parts: ``30: 11 compiled, 19 shared``. A single part needs no total."""
    if len(kinds) == 1:
        return "".join(f"{count} {kind}" for kind, count in kinds.items())
    first = dict(kinds.most_common(shown))
    parts = [f"{count} {kind}" for kind, count in first.items()]
    rest = kinds.total() - sum(first.values())
    return f"{kinds.total()}: " + ", ".join([*parts, *([f"{rest} more"] if rest else [])])


def most(texts: Iterable[str], what: str) -> Iterator[str]:
    """The first few texts, and how many more there are."""
    for number, text in enumerate(texts := [*texts]):
        if number == SHOWN_IN_SHORT:
            yield f"and {counted(len(texts) - number, f'more {what}')}: print(report.details())"
            return
        yield text
