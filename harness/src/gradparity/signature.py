"""Signature: what makes two divergences the same one.

In: a row of a case that diverged. Out: a `Signature`: verdict, symptom, place and stage. The shrinker keeps
it, the campaign counts by it, the report groups by it. Values, sizes, seeds and names are no part of it. Of
programs that were shrunk, `operators` names what is left of them: two defects may look alike until then.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from gradparity.verdict import Row, Verdict


@dataclass(frozen=True, order=True)
class Signature:
    """One kind of divergence. `place`: where it was seen: in gradients, values or hooks of a kind, or which
    function raised and how its message begins. `operators`: what a shrunk program still calls, sorted.
    `stage`: the row's, "" where nobody knows it. Two stages never share a signature.
    """

    verdict: Verdict
    symptom: str
    place: str = ""
    operators: tuple[str, ...] = ()
    stage: str = ""

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits, for file names and tables."""
        stage = (f"stage {self.stage}",) if self.stage else ()
        text = "\n".join((self.verdict.value, self.symptom, self.place, *self.operators, *stage))
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    @property
    def coarse(self) -> Signature:
        """The same without operators: what a single run can tell."""
        return replace(self, operators=())

    def describe(self) -> str:
        """One line."""
        names = f" [{' '.join(self.operators)}]" if self.operators else ""
        where = f" at {self.place}" if self.place else ""
        stage = f" by {self.stage}" if self.stage else ""
        return f"{self.verdict.value} {self.symptom}{where}{stage}{names}"

    def covers(self, other: Signature) -> bool:
        """Whether the other may be the same defect in a larger program: it looks the same, and calls all that
        this one needs. A refusal says itself what it is about, whatever the program calls.
        """
        alike = self.coarse == other.coarse
        return alike and (self.verdict is Verdict.UNSUPPORTED or set(self.operators) <= set(other.operators))

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return {
            "verdict": self.verdict.value,
            "symptom": self.symptom,
            "place": self.place,
            "operators": list(self.operators),
            "stage": self.stage,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Signature:
        """The inverse of `to_json`."""
        verdict, operators = Verdict(data["verdict"]), tuple(data["operators"])
        return cls(verdict, data["symptom"], data["place"], operators, data.get("stage", ""))


def signature_of(row: Row, operators: tuple[str, ...] = ()) -> Signature:
    """The signature of a row that diverged, with what its program calls."""
    return Signature(row.verdict, row.symptom, row.place, tuple(sorted(set(operators))), row.stage)
