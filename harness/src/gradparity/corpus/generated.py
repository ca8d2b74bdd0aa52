"""The corpus "generated": programs drawn at random, each found again by policy and seed.

In: a policy's name as a chunk. Out: programs with addresses such as "generated::views::7". A run takes the
first ones of every policy; any other seed is found by its address. A program is drawn when it first runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial

import torch

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.errors import UnknownNameError
from gradparity.generate.draw import drawn
from gradparity.generate.load import body_of
from gradparity.generate.policies import POLICIES
from gradparity.generate.script import Script
from gradparity.probe import Body, Probe

NAME = "generated"
COUNT = 100
"""How many programs of each policy belong to the corpus."""


class GeneratedCorpus:
    """One chunk per policy."""

    name = NAME

    def chunks(self) -> list[str]:
        """The policies' names."""
        return list(POLICIES)

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """The first programs of this policy."""
        for index in range(COUNT):
            case = Case(self.name, _known(chunk), index, seed)
            yield Program(case, partial(_drawn_now, case), f"drawn by the policy {chunk}")

    def program(self, case: Case, device: torch.device) -> Program:
        """The program of this case, whatever its index."""
        return generated(case)


def generated(case: Case) -> Program:
    """The program of this policy and seed. Raises UnknownNameError if there is no such policy."""
    return scripted(case, drawn(_known(case.name), case.index or 0))


def scripted(case: Case, script: Script) -> Program:
    """A script as a program under this case's address."""
    tags = ("cold",) if script.cold else ()
    about = POLICIES[script.policy].doc if script.policy in POLICIES else "written by hand"
    doc = script.doc or f"drawn by the policy {script.policy}: {about}"
    return Program(case, body_of(script), doc, tags, fp64=script.fp64, source=script.source)


def _drawn_now(case: Case, p: Probe) -> None:
    """The body of a program that is drawn when it first runs."""
    _body(case.name, case.index or 0)(p)


@lru_cache(maxsize=8)
def _body(name: str, seed: int) -> Body:
    """The body of a script; kept for the few runs that one comparison takes."""
    return body_of(drawn(name, seed))


def _known(name: str) -> str:
    if name not in POLICIES:
        raise UnknownNameError("policy", name, list(POLICIES))
    return name
