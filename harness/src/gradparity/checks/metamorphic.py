"""Metamorphic relations: another form of the same program, under the same subject, shows the same. No
reference is needed.

In: a program, with the twins that its corpus gives it (`Program.twins`), under a subject. Out: a Finding
for the first twin that shows something else, where eager's twin does not. One twin exists for every
program: hooks that return what they are given, on all leaves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradparity.corpus.base import Program
from gradparity.observe import Body, observe
from gradparity.oracles.evidence import Evidence, Reference
from gradparity.oracles.judge import Judgement, judge
from gradparity.probe import Probe
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import Finding, Verdict


def metamorphic(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Compares each twin's outcome with the program's own, within what dtypes allow."""
    for name, twin in twins(program).items():
        found = _relation(program, twin, subject, device)
        if (
            found.verdict.is_divergence
            and not _relation(program, twin, Eager("eager"), device).verdict.is_divergence
        ):
            reason = f"the same program with {name} shows something else: {found.reason}"
            return Finding(Verdict.DIVERGE, f"metamorphic {name}", reason)
    return None


def twins(program: Program) -> Mapping[str, Body]:
    """The program's own twins, and the one that every program has."""
    return {"identity hooks": with_identity_hooks(program.body), **program.twins}


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


def _relation(program: Program, twin: Body, subject: Subject, device: torch.device) -> Judgement:
    def run(body: Body, dtype: torch.dtype) -> Evidence:
        subject.reset(program.cold)
        one = observe(program.case, program.body, subject, dtype, device)
        subject.reset(program.cold)
        return Evidence(one, observe(program.case, body, subject, dtype, device), bitwise=False)

    evidence = run(twin, torch.float32)
    if program.fp64:
        eager = Eager("eager")
        evidence.reference = lambda: Reference(
            observe(program.case, program.body, eager, torch.float64, device)
        )
    return judge(evidence)
