"""Case: the run-once unit, small enough to be written on a command line.

In: corpus, name, optional sample index, seed. Out: a frozen value with an address such as "op_db::add::3" and
a JSON form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from gradparity.errors import CaseError

SEPARATOR = "::"
#: globs that every case matches.
EVERY = ("*",)


@dataclass(frozen=True, order=True)
class Case:
    """One program with its inputs, found again by corpus, name and (for sampled corpora) index."""

    corpus: str
    name: str
    index: int | None = None
    seed: int = 0

    @property
    def address(self) -> str:
        """ "corpus::name" or "corpus::name::index"."""
        parts = [self.corpus, self.name] + ([] if self.index is None else [str(self.index)])
        return SEPARATOR.join(parts)

    @classmethod
    def parse(cls, address: str, seed: int = 0) -> Case:
        """The inverse of `address`. Raises CaseError if the text is no address."""
        corpus, *rest = address.split(SEPARATOR)
        if len(rest) == 1 and corpus and rest[0]:
            return cls(corpus, rest[0], None, seed)
        if len(rest) == 2 and rest[1].isdecimal():
            return cls(corpus, rest[0], int(rest[1]), seed)
        raise CaseError(f"not a case address: {address!r}\n  form   corpus::name or corpus::name::index")

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `from_json` turns back into an equal case."""
        return {"corpus": self.corpus, "name": self.name, "index": self.index, "seed": self.seed}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """The inverse of `to_json`."""
        return cls(data["corpus"], data["name"], data["index"], data["seed"])


@dataclass(frozen=True)
class Match:
    """Globs over case addresses: "add*" (names), "op_db::add*" (any index), or "op_db::add::*" (all three
    parts). A case is taken if one of them matches.
    """

    globs: tuple[str, ...] = EVERY

    def _indices(self, corpus: str, name: str) -> Iterator[str]:
        """The globs for the index of cases of a chunk."""
        for glob in self.globs:
            parts = glob.split(SEPARATOR)
            corpus_glob, name_glob, index = ["*", *parts, "*"] if len(parts) == 1 else [*parts, "*"][:3]
            if fnmatchcase(corpus, corpus_glob) and fnmatchcase(name, name_glob):
                yield index

    def takes_chunk(self, corpus: str, name: str) -> bool:
        """Whether some case of this chunk can match."""
        return next(self._indices(corpus, name), None) is not None

    def takes(self, case: Case) -> bool:
        """Whether this case matches."""
        index = "" if case.index is None else str(case.index)
        return any(fnmatchcase(index, glob) for glob in self._indices(case.corpus, case.name))
