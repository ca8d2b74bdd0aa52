"""Planted faults: each is found, by the oracle that should find it, and most by generated programs alone."""

from __future__ import annotations

import warnings

import pytest
import torch

from gradparity.case import Case
from gradparity.checks.registry import chosen
from gradparity.corpus.base import Program
from gradparity.corpus.registry import program
from gradparity.differential import compare
from gradparity.subjects.planted import FAULTS, Fault
from gradparity.subjects.planted.backwards import leaves_of
from gradparity.subjects.registry import resolve
from gradparity.verdict import Verdict

CPU = torch.device("cpu")
ELSEWHERE = {"hang", "deaf-hang", "exit"}
"""Found by the executors, in test_executors.py."""
BY_POLICY = {name: fault for name, fault in FAULTS.items() if fault.policies}
BY_CHECK = {name: fault for name, fault in FAULTS.items() if fault.check}
BY_SCENARIO = {name: fault for name, fault in FAULTS.items() if fault.scenario}


def address_of_a_find(fault: Fault, most: int) -> str | None:
    """The first generated program of which the right oracle says something, among so many; None if none."""
    subject = resolve(f"planted:{fault.name}")
    for number in range(most):
        seed, place = divmod(number, len(fault.policies))
        case = Case("generated", fault.policies[place], seed)
        row = compare(program(case, CPU), subject, CPU, confirm=False).row
        if row.is_find and row.symptom in fault.symptoms:
            return case.address
    return None


def test_there_are_enough_and_every_one_has_somebody_who_finds_it() -> None:
    assert len(FAULTS) >= 80
    assert FAULTS.keys() == BY_POLICY.keys() | BY_CHECK.keys() | BY_SCENARIO.keys() | ELSEWHERE
    assert len(BY_POLICY) >= 75
    assert all(fault.doc and fault.symptoms for fault in FAULTS.values())


def test_most_are_found_by_a_few_generated_programs() -> None:
    found = [name for name, fault in BY_POLICY.items() if address_of_a_find(fault, 5)]
    assert len(found) >= 40, sorted(BY_POLICY.keys() - set(found))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BY_POLICY)
def test_every_one_is_found_by_generated_programs(name: str) -> None:
    assert address_of_a_find(BY_POLICY[name], 240) is not None


def noisy(p) -> None:
    """Warns in what is compiled, and shows a tensor."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("a user's own", stacklevel=1)
        return x * 2

    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        p.compile(forward)(x).sum().backward()


@pytest.mark.parametrize("name", BY_CHECK)
def test_what_no_oracle_sees_a_check_finds(name: str) -> None:
    fault, case = FAULTS[name], Program(Case("test", "noisy"), noisy)
    (check,) = chosen((fault.check,)).values()
    assert compare(case, resolve(f"planted:{name}"), CPU).row.verdict is Verdict.AGREE
    assert check(case, resolve("eager"), CPU) is None
    assert check(case, resolve(f"planted:{name}"), CPU).symptom in fault.symptoms


@pytest.mark.parametrize("name", BY_SCENARIO)
def test_what_no_generated_program_shows_a_scenario_finds(name: str) -> None:
    fault = FAULTS[name]
    case = program(Case("scenarios", fault.scenario), CPU)
    assert compare(case, resolve("eager"), CPU).row.verdict is Verdict.AGREE
    assert compare(case, resolve(f"planted:{name}"), CPU).row.symptom in fault.symptoms


@pytest.mark.parametrize("name", BY_POLICY)
def test_a_fault_leaves_nothing_behind(name: str) -> None:
    before = (
        torch.autograd.backward,
        torch.autograd.grad,
        torch.autograd.Function.__dict__["apply"],
        torch.Tensor.register_hook,
        torch.no_grad.__enter__,
        torch.autocast.__enter__,
        torch.is_grad_enabled(),
    )
    compare(program(Case("generated", FAULTS[name].policies[0], 1), CPU), resolve(f"planted:{name}"), CPU)
    assert before == (
        torch.autograd.backward,
        torch.autograd.grad,
        torch.autograd.Function.__dict__["apply"],
        torch.Tensor.register_hook,
        torch.no_grad.__enter__,
        torch.autocast.__enter__,
        torch.is_grad_enabled(),
    )


def test_the_leaves_that_a_backward_reaches() -> None:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert {id(leaf) for leaf in leaves_of((x * 2 + x).sum())} == {id(x)}
    assert {id(leaf) for leaf in leaves_of([x.sin(), (x * y).sum()])} == {id(x), id(y)}
