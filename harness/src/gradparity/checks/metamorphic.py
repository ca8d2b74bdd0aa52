"""Metamorphic relations: another form of the same program, under the same subject, shows the same. No
reference is needed.

In: a program, with the twins that its corpus gives it (`Program.twins`), under a subject. Out: a Finding
for the first twin that shows something else, where eager's twin does not. One twin exists for every
program: hooks that return what they are given, on all leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gradparity.corpus.base import Program
from gradparity.generate.load import body_of_sources
from gradparity.generate.script import widened
from gradparity.generate.twins import twins as rewritten
from gradparity.observe import observe
from gradparity.oracles.evidence import Evidence, Reference
from gradparity.oracles.judge import Judgement, judge
from gradparity.outcome import Outcome
from gradparity.probe import Body, Probe
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import Finding, Verdict


@dataclass(frozen=True)
class Twin:
    """Another form of a program. `ordered`: its hooks are called in the same order."""

    body: Body
    ordered: bool = True


def metamorphic(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Compares each twin's outcome with the program's own, within what dtypes allow."""
    for name, twin in twins(program).items():
        found = relation(program, twin, subject, device)
        if not found.verdict.is_divergence:
            continue
        if not relation(program, twin, Eager("eager"), device).verdict.is_divergence:
            reason = f"the same program with {name} shows something else: {found.reason}"
            return Finding(Verdict.DIVERGE, f"metamorphic {name}", reason)
    return None


def twins(program: Program) -> dict[str, Twin]:
    """The twin that every program has, the program's own, and those that its text gives: the latter may call
    hooks in another order.
    """
    found = {"identity hooks": Twin(with_identity_hooks(program.body))}
    found |= {name: Twin(body) for name, body in program.twins.items()}
    if program.source is not None:
        found |= {
            name: Twin(_loaded(text), ordered=False) for name, text in rewritten(program.source).items()
        }
    return found


def _loaded(text: str) -> Body:
    return body_of_sources(text, widened(text))


def with_identity_hooks(body: Body) -> Body:
    """The same program with a hook on every leaf that returns what it is given."""

    def run(p: Probe) -> None:
        p.each_leaf(_hang)
        body(p)

    return run


def _hang(leaf: torch.Tensor) -> None:
    if leaf.requires_grad:
        leaf.register_hook(_same)


def _same(grad: torch.Tensor) -> torch.Tensor:
    return grad


def relation(program: Program, twin: Twin, subject: Subject, device: torch.device) -> Judgement:
    """What the oracles say of a program and its twin under one subject."""

    def run(body: Body, who: Subject, dtype: torch.dtype) -> Outcome:
        who.reset(program.cold)
        outcome = observe(program.case, body, who, dtype, device)
        return outcome if twin.ordered else replace(outcome, events=(), invariants=(), state=())

    one = run(program.body, subject, torch.float32)
    evidence = Evidence(one, run(twin.body, subject, torch.float32), bitwise=False)
    if program.fp64:
        evidence.reference = lambda: Reference(run(program.body, Eager("eager"), torch.float64))
    return judge(evidence)
