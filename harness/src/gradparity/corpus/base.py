"""What a corpus is: named chunks, each a list of programs.

In: a chunk name, a device, a seed. Out: Programs, always the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from gradparity.case import Case
from gradparity.probe import Body


@dataclass(frozen=True)
class Program:
    """A case with the function that runs it and what is known about it.

    `fp64`: whether a float64 reference run makes sense. `skip`: reasons, by subject name, to set the case
    aside. `twins`: other forms of the body that must show the same. `source`: the program as Python text
    with a function `run(p)`; `plain`: the body as a module-level function, or a partial of one with plain
    arguments: either is what a script needs if the body was made inside a function. `cold`: the subject
    must forget everything it compiled before. `untried`: nobody knows whether eager runs it; where it raises,
    the case says nothing and is set aside.
    """

    case: Case
    body: Body
    doc: str = ""
    tags: tuple[str, ...] = ()
    issue: str | None = None
    fp64: bool = True
    skip: Mapping[str, str] = field(default_factory=dict)
    twins: Mapping[str, Body] = field(default_factory=dict)
    source: str | None = None
    plain: Body | None = None
    untried: bool = False

    @property
    def cold(self) -> bool:
        """Whether the case asks the subject to start without caches."""
        return "cold" in self.tags

    @property
    def rounds_to(self) -> torch.dtype | None:
        """The dtype of lower precision in which the case computes, if its tags say so."""
        return torch.bfloat16 if {"autocast", "low-precision"}.intersection(self.tags) else None


class Corpus(Protocol):
    """A named source of programs. A chunk is what one worker runs at a stretch."""

    name: str

    def chunks(self) -> list[str]:
        """Names of all chunks, in a fixed order."""

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """The chunk's programs, in a fixed order."""


@runtime_checkable
class Addressed(Protocol):
    """A corpus that makes a program from its address, without going through all before it."""

    def program(self, case: Case, device: torch.device) -> Program:
        """The program of this case."""
