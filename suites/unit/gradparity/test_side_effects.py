"""What a run leaves behind: changed tensors, the log, random state, invariants."""

import contextlib
import io
from dataclasses import replace

import pytest
import torch

from gradparity.differential import compare
from gradparity.oracles.invariants import invariants
from gradparity.oracles.judge import judge
from gradparity.oracles.side_effects import side_effects
from gradparity.outcome import Invariant, Outcome, StateRecord, freeze
from gradparity.subjects.base import Subject
from gradparity.verdict import Verdict

CPU = torch.device("cpu")


def training(p) -> None:
    """A buffer changes in place, something is logged, dropout draws."""
    norm = p.module(torch.nn.BatchNorm1d(3), "norm")
    x = p.leaf("x", p.randn(4, 3, requires_grad=True))
    y = torch.nn.functional.dropout(norm(x), 0.5)
    p.log.append("forward")
    with p.backward():
        y.sum().backward()
    p.same_mask("dropout", y, torch.autograd.grad(norm(x).sum(), x)[0] * 0 + (y != 0))


class Silent(Subject):
    """Prints nothing."""

    def compile(self, target):
        def call(*args):
            with contextlib.redirect_stdout(io.StringIO()):
                return target(*args)

        return call


def printing(p) -> None:
    """Prints in what is compiled."""
    p.log.append("before")
    p.compile(lambda: print("one\ntwo"))()  # noqa: T201


def test_what_is_printed_is_part_of_the_log_and_shown(bench, capsys) -> None:
    row = compare(bench.program(printing), Silent("silent"), CPU).row
    assert (row.verdict, row.symptom) == (Verdict.DIVERGE, "log")
    assert "3 entries in eager, 1 under the subject" in row.reason
    assert capsys.readouterr().out == "one\ntwo\n" * 2


class Changed(Subject):
    """Eager, whose outcome is changed by a function."""

    def __init__(self, change) -> None:
        super().__init__("changed")
        self._change = change

    def observed(self, outcome: Outcome) -> Outcome:
        return self._change(outcome)


def state(outcome: Outcome, name: str, **changes) -> Outcome:
    found = [replace(item, **changes) if item.name == name else item for item in outcome.state]
    return replace(outcome, state=tuple(found))


CHANGES = {
    "state-values": lambda o: state(o, "norm.running_mean", value=freeze(torch.full((3,), 9.0))),
    "state-dtype": lambda o: state(o, "norm.running_mean", value=freeze(torch.zeros(3, dtype=torch.float64))),
    "state-version": lambda o: state(o, "norm.num_batches_tracked", changes=0),
    "log": lambda o: replace(o, log=()),
    "random-state": lambda o: replace(o, random="another"),
    "invariant": lambda o: replace(o, invariants=(Invariant("dropout", False, "two masks"),)),
}


@pytest.mark.parametrize("symptom", CHANGES)
def test_what_is_left_behind_otherwise_is_found(bench, symptom: str) -> None:
    row = compare(bench.program(training), Changed(CHANGES[symptom]), CPU).row
    assert (row.verdict, row.symptom) == (Verdict.DIVERGE, symptom)


def test_eager_agrees_with_itself_and_leaves_and_buffers_are_watched(bench) -> None:
    outcome = bench.outcome(training)
    assert [item.name for item in outcome.state] == [
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "x",
    ]
    assert (outcome.log, outcome.drew) == (("forward",), True)
    assert compare(bench.program(training), Subject("eager"), CPU).row.verdict is Verdict.AGREE


def test_a_counter_that_rose_by_another_number_is_only_noted(bench) -> None:
    one, two = (Outcome(state=(StateRecord("b", 1, changes=n),)) for n in (2, 1))
    evidence = bench.evidence(one, two)
    assert side_effects(evidence) is None
    assert evidence.notes == ["b: version counter rose by 2 in eager, by 1 under the subject"]


def test_an_invariant_that_eager_breaks_too_says_nothing(bench) -> None:
    broken = Outcome(invariants=(Invariant("mask", False),))
    assert invariants(bench.evidence(broken, broken)) is None


def test_a_subject_with_random_numbers_of_its_own_is_held_to_what_holds_for_any(bench) -> None:
    def other_numbers(outcome: Outcome) -> Outcome:
        return replace(outcome, values=(), random="another")

    eager = replace(bench.outcome(training), drew=True)
    evidence = replace(bench.evidence(eager, other_numbers(eager)), own_random=True)
    assert judge(evidence).verdict is Verdict.AGREE
    broken = replace(eager, invariants=(Invariant("dropout", False),))
    assert judge(replace(bench.evidence(eager, broken), own_random=True)).symptom == "invariant"
