"""Hand-written programs: the decorator that registers one, and the corpus of all of them.

In: plain functions `def name(p: Probe) -> None` with a one-sentence docstring. Out: the corpus "scenarios".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.errors import CaseError, UnknownNameError
from gradparity.probe import Body


@dataclass(frozen=True)
class Scenario:
    """A registered program and what its author said about it."""

    name: str
    body: Body
    doc: str
    tags: tuple[str, ...]
    issue: str | None
    subjects_skip: Mapping[str, str] = field(default_factory=dict)
    fp64: bool = True


_REGISTERED: dict[str, Scenario] = {}
_TARGETS: list[dict[str, Scenario]] = [_REGISTERED]
"""Where the decorator registers: the last of them."""


def scenario(
    *,
    tags: tuple[str, ...] = (),
    issue: str | None = None,
    subjects_skip: Mapping[str, str] | None = None,
    fp64: bool = True,
) -> Callable[[Body], Body]:
    """Registers the decorated function as the case "scenarios::<its name>".

    Arguments: tags ("cold" asks subjects to start without caches; "autocast" and "low-precision" say that it
    computes in bfloat16 inside, which bounds what may differ without a reference); the issue it shows, as
    "pytorch#138553"; reasons not to run it, by subject name; whether a float64 reference run makes sense.
    Raises CaseError if the name is taken or the docstring is missing.
    """

    def register(body: Body) -> Body:
        name = body.__name__
        doc = " ".join((body.__doc__ or "").split())
        if not doc:
            raise CaseError(
                f"scenario {name} has no docstring\n  try    one sentence: what eager does that is at stake"
            )
        target = _TARGETS[-1]
        if name in target:
            raise CaseError(
                f"two scenarios are called {name!r}: {target[name].body.__module__}, {body.__module__}"
            )
        target[name] = Scenario(name, body, doc, tuple(tags), issue, dict(subjects_skip or {}), fp64)
        return body

    return register


@contextmanager
def collecting() -> Iterator[dict[str, Scenario]]:
    """Inside, the decorator registers into the given dictionary, not into the corpus "scenarios"."""
    _TARGETS.append({})
    try:
        yield _TARGETS[-1]
    finally:
        _TARGETS.pop()


def program_of(item: Scenario, case: Case) -> Program:
    """The scenario as a program."""
    return Program(case, item.body, item.doc, item.tags, item.issue, item.fp64, item.subjects_skip)


def registered() -> dict[str, Scenario]:
    """All hand-written scenarios, by name. They are imported when somebody first asks: that takes seconds."""
    _TARGETS.append(_REGISTERED)
    try:
        importlib.import_module("gradparity.corpus.scenarios")
    finally:
        _TARGETS.pop()
    return dict(_REGISTERED)


class ScenarioCorpus:
    """The corpus "scenarios": every registered function, one case and one chunk each."""

    name = "scenarios"

    def chunks(self) -> list[str]:
        """Names of all scenarios, in order of registration."""
        return list(registered())

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """The one program of this scenario."""
        known = registered()
        if chunk not in known:
            raise UnknownNameError("scenario", chunk, sorted(known))
        yield program_of(known[chunk], Case(self.name, chunk, None, seed))
