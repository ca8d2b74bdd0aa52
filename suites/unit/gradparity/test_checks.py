"""Checks: each finds the subject that is wrong in its way, and is silent for eager."""

import warnings
from contextlib import contextmanager

import pytest
import torch

from gradparity.checks import cache as cache_check
from gradparity.checks.cache import cache
from gradparity.checks.cost import peak_bytes
from gradparity.checks.interrupts import interrupts
from gradparity.checks.leaks import leaks
from gradparity.checks.memory import memory
from gradparity.checks.metamorphic import metamorphic
from gradparity.checks.once import shown
from gradparity.checks.registry import CHECKS, chosen
from gradparity.checks.reuse import recompiles, reuse
from gradparity.checks.warned import warned
from gradparity.errors import UnknownNameError
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import Verdict
from gradparity.work import checked, judged

CPU = torch.device("cpu")


def stepping(p) -> None:
    """A product and its backward."""
    x = p.leaf("x", p.randn(64, 64, requires_grad=True))
    y = p.compile(lambda x: (x @ x).sum())(x)
    warnings.warn("as each time", UserWarning, stacklevel=1)
    with p.backward():
        y.backward()


class Stale(Subject):
    """Wrong from the second run on, until everything is forgotten."""

    runs = 0

    def compile(self, target):
        self.runs += 1
        scale = 1 if self.runs == 1 else 2
        return lambda *args: target(*args) * scale

    def reset(self, cold: bool) -> None:
        self.runs = 0


class Compiling(Subject):
    """Compiles in every run."""

    def compiles(self) -> int:
        return 1


class Settled(Compiling):
    """Compiles in the first run after everything was forgotten."""

    runs = 0

    def begin(self) -> None:
        self.runs += 1

    def compiles(self) -> int:
        return int(self.runs == 1)

    def reset(self, cold: bool) -> None:
        self.runs = 0


class Keeping(Subject):
    """Keeps a tensor of every run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.kept = []

    def compile(self, target):
        self.kept.append(torch.ones(1))
        return target


class Greedy(Subject):
    """Takes memory for a moment."""

    def compile(self, target):
        torch.zeros(1 << 20).sum()
        return target


class Mute(Subject):
    """Gives no warnings of the program."""

    def around(self):
        return warnings.catch_warnings(record=True)


class Doubling(Subject):
    """Doubles a gradient for each hook on the leaf."""

    def compile(self, target):
        def run(x):
            y = target(x)
            return y * (1 + len(x._backward_hooks or ()))

        return run


class Careless(Subject):
    """Does not put back what it switches if the backward raises."""

    @contextmanager
    def backward(self):
        torch._C._set_multithreading_enabled(False)
        yield
        torch._C._set_multithreading_enabled(True)


FOUND = {
    "reuse": (reuse, Stale, "reuse grad-values-bits"),
    "recompiles": (recompiles, Compiling, "recompiles"),
    "warnings": (warned, Mute, "warning"),
    "metamorphic": (metamorphic, Doubling, "metamorphic identity hooks"),
    "leaks": (leaks, Keeping, "leak"),
    "memory": (memory, Greedy, "peak-memory"),
    "interrupts": (interrupts, Careless, "interrupt"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_check_finds_what_is_wrong_and_is_silent_for_eager(bench, name: str) -> None:
    check, subject, symptom = FOUND[name]
    program = bench.program(stepping)
    found = check(program, subject("s"), CPU)
    assert (found.verdict, found.symptom) == (Verdict.DIVERGE, symptom)
    if name != "recompiles":  # eager compiles nothing, which the check cannot tell from a settled compiler
        assert check(program, Eager("eager"), CPU) is None


def test_a_compiler_that_settles_does_not_recompile(bench) -> None:
    assert recompiles(bench.program(stepping), Settled("s"), CPU) is None


def test_a_twin_that_differs_in_eager_too_says_nothing(bench) -> None:
    def twin(p) -> None:
        p.value("another", 1)

    program = bench.program(stepping, twins={"nonsense": twin})
    assert metamorphic(program, Eager("eager"), CPU) is None


def test_the_peak_of_a_run_is_exact() -> None:
    def run() -> None:
        first = torch.ones(1 << 18)
        del first
        torch.ones(1 << 17)

    assert (1 << 20) <= peak_bytes(run, CPU) < (1 << 20) + 4096


def test_two_processes_are_compared_by_what_they_show(bench, monkeypatch) -> None:
    answers = [{"grad x": "a", "log": "l"}, {"grad x": "b", "log": "l"}]
    monkeypatch.setattr(cache_check, "_shown", lambda words, folder: answers.pop())
    found = cache(bench.program(stepping), Eager("eager"), CPU)
    assert (found.symptom, found.reason) == ("cache", "with filled caches grad x is a, with empty ones b")


def test_what_is_shown_covers_every_observation(bench) -> None:
    outcome = bench.outcome(stepping)
    assert set(shown(outcome)) == {"grad x", "state x", "log", "raised"}


def test_a_case_that_agrees_is_checked_and_the_first_finding_is_its_verdict(bench) -> None:
    program, subject = bench.program(stepping), Keeping("s")
    row = checked(judged(program, subject, CPU), program, subject, CPU, ("leaks", "reuse"))
    assert (row.verdict, row.symptom) == (Verdict.DIVERGE, "leak")
    assert row.signature


def test_checks_are_chosen_by_name() -> None:
    assert chosen(("all",)) == CHECKS
    assert list(chosen(("leaks", "reuse")).items()) == [("reuse", reuse), ("leaks", leaks)]
    with pytest.raises(UnknownNameError, match="unknown check 'luck'"):
        chosen(("luck",))
