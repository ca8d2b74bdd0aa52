"""stored: the corpora "finds:<store>": one case for each distinct divergence that a store holds.

In: a store. Out: a corpus, one chunk per find, named for its signature; the programs are those of the
corpora in which they were found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.corpus.registry import imported_by, program
from gradparity.errors import CorpusError, UnknownNameError
from gradparity.store.store import Store
from gradparity.verdict import Row

PREFIX = "finds:"


class FindsCorpus:
    """The finds of a store."""

    def __init__(self, path: str) -> None:
        self.name = PREFIX + path
        self._path = Path(path)

    @cached_property
    def _rows(self) -> dict[str, Row]:
        with Store(self._path, create=False) as store:
            rows = [row for row in store.rows() if row.is_find]
        return {row.signature or row.case: row for row in reversed(rows)}

    def chunks(self) -> list[str]:
        """Signatures."""
        return sorted(self._rows)

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """The program of this find, with the seed with which it was found."""
        if chunk not in self._rows:
            raise UnknownNameError("find", chunk, sorted(self._rows))
        row = self._rows[chunk]
        if place := imported_by(row.case):
            raise CorpusError(
                f"the find {chunk} of {self._path} would import {place}\n"
                f"  try    gradparity replay {self._path} --trust, if you know where it is from"
            )
        found = program(Case.parse(row.case, row.seed), device)
        yield replace(found, case=Case(self.name, chunk, None, row.seed))
