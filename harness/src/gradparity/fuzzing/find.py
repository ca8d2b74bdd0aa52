"""Find: one distinct divergence that a campaign came upon, and the folder in which finds are kept.

In: what a worker reports, or a JSON file. Out: frozen values; JSON files that are named by signature.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradparity.errors import CaseError
from gradparity.generate.script import Script
from gradparity.reading import read_as
from gradparity.signature import Signature
from gradparity.verdict import Row

UNFIT = re.compile(r"[^\w.-]")
"""What a subject's name may have and a file's may not."""


@dataclass(frozen=True)
class Find:
    """A divergence. `address`: of the program that was drawn; `script`: as it was drawn; `shrunk`: the
    smallest that diverges alike; `signature`: of the shrunk one; `row`: of the run that confirmed it;
    `tried`: how many scripts the shrinker tried; `torch`: the version.
    """

    subject: str
    address: str
    seed: int
    script: Script
    shrunk: Script
    signature: Signature
    row: Row
    tried: int = 0
    torch: str = ""

    @property
    def name(self) -> str:
        """What its file is called, without ".json"."""
        return f"{UNFIT.sub('_', self.subject)}_{self.signature.digest}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return asdict(self) | {
            "script": self.script.model_dump(mode="json"),
            "shrunk": self.shrunk.model_dump(mode="json"),
            "signature": self.signature.to_json(),
            "row": self.row.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Find:
        """The inverse of `to_json`. Raises CaseError if the data are no find."""
        try:
            return read_as(cls, data)
        except ValueError as error:
            raise CaseError(f"not a find: {error}") from error


class Folder:
    """A folder with one JSON file for each find."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, find: Find) -> Path:
        """Writes the find, in the place of one with the same subject and signature. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / f"{find.name}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(find.to_json(), indent=1) + "\n", encoding="utf-8")
        part.replace(file)
        return file

    def finds(self) -> list[Find]:
        """All finds, in order of their files' names. Raises CaseError for a file that is none."""
        return [self._read(file) for file in sorted(self.path.glob("*.json"))]

    def _read(self, file: Path) -> Find:
        try:
            return Find.from_json(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError, CaseError) as error:
            raise CaseError(f"{file}: {error}") from error
