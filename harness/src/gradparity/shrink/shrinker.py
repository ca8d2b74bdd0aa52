"""shrinker: makes a script smaller as long as it stays interesting.

In: a script and a question that it answers with yes. Out: a smaller script that does, too, and what it cost.
The passes stand in one tuple; they are gone through until none of them finds a cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gradparity.errors import GradparityError
from gradparity.generate.script import Script
from gradparity.shrink import expressions, interface, lines, statements
from gradparity.shrink.cut import Pass

PASSES: tuple[Pass, ...] = (
    statements.settings,
    statements.steps,
    statements.bypassed,
    statements.lines,
    expressions.constants,
    expressions.called_lambdas,
    statements.dead,
    interface.results,
    interface.parameters,
    statements.unwrapped,
    statements.definitions,
    expressions.operands,
    expressions.plain_operators,
    statements.aliases,
    expressions.arguments,
    expressions.sizes,
    expressions.dtypes,
    expressions.numbers,
    lines.text_lines,
)
"""In this order: what cuts most comes first."""

Question = Callable[[Script], bool]


@dataclass(frozen=True)
class Shrunk:
    """The result, how many scripts were tried, and whether no pass had anything left to cut."""

    script: Script
    tried: int
    done: bool


class Shrinker:
    """Tries cuts until none helps or time is up.

    Arguments: the question, and for how many seconds to go on.
    """

    def __init__(self, question: Question, seconds: float = 60.0) -> None:
        self._question, self._until = question, time.monotonic() + seconds
        self._known: set[str] = set()
        self.tried = 0

    def shrink(self, script: Script) -> Shrunk:
        """The smallest script that the passes find."""
        self._known.add(script.source)
        while True:
            before = script.source
            for each in PASSES:
                script = self._exhaust(each, script)
            if script.source == before or self._is_late():
                return Shrunk(script, self.tried, script.source == before)

    def _exhaust(self, each: Pass, script: Script) -> Script:
        """Goes through the cuts of one pass; after a success, from the same place in those of the result."""
        place = 0
        cuts = list(each(script))
        while place < len(cuts) and not self._is_late():
            found = self._try(cuts[place])
            if found is None:
                place += 1
                continue
            script, cuts = found, list(each(found))
        return script

    def _try(self, cut: Callable[[], Script]) -> Script | None:
        try:
            script = cut()
        except (GradparityError, SyntaxError, ValueError):
            return None
        if script.source in self._known:
            return None
        self._known.add(script.source)
        self.tried += 1
        return script if self._question(script) else None

    def _is_late(self) -> bool:
        return time.monotonic() > self._until
