"""Checks: each finds the subject that is wrong in its way, and is silent for eager."""

import time
import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from gradparity.checks import cache as cache_check
from gradparity.checks.cache import cache
from gradparity.checks.cost import peak_bytes, seconds
from gradparity.checks.interrupts import interrupts
from gradparity.checks.leaks import leaks
from gradparity.checks.memory import budget, memory
from gradparity.checks.metamorphic import metamorphic
from gradparity.checks.once import shown
from gradparity.checks.registry import CHECKS, chosen
from gradparity.checks.reuse import recompiles, reuse
from gradparity.checks.slow import slow
from gradparity.checks.warned import warned
from gradparity.errors import UnknownNameError
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.subjects.registry import resolve
from gradparity.verdict import Verdict
from gradparity.work import judged

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
    """Takes memory for a moment of the forward."""

    def compile(self, target):
        def run(*args):
            torch.zeros(1 << 20).sum()
            return target(*args)

        return run


class Idle(Subject):
    """Does nothing for 20 ms in each backward."""

    @contextmanager
    def backward(self):
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        yield


class Hoarding(Subject):
    """Takes memory under a small budget only."""

    def compile(self, target):
        def run(*args):
            share = torch._functorch.config.activation_memory_budget
            torch.zeros(1 << 20 if share < 0.1 else 1).sum()
            return target(*args)

        return run


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
    "slow": (partial(slow, floor=0.0), Idle, "time"),
    "budget": (budget, Hoarding, "peak-by-budget"),
    "interrupts": (interrupts, Careless, "interrupt"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_check_finds_what_is_wrong_and_is_silent_for_eager(bench, name: str) -> None:
    check, subject, symptom = FOUND[name]
    program = bench.program(stepping)
    found = check(program, subject("s"), CPU)
    verdict = {"time": Verdict.SLOW}.get(symptom, Verdict.MEMORY if "peak" in symptom else Verdict.DIVERGE)
    assert (found.verdict, found.symptom) == (verdict, symptom)
    if name != "recompiles":  # eager compiles nothing, which the check cannot tell from a settled compiler
        assert check(program, Eager("eager"), CPU) is None


def test_a_compiler_that_settles_does_not_recompile(bench) -> None:
    assert recompiles(bench.program(stepping), Settled("s"), CPU) is None


def test_a_twin_that_differs_in_eager_too_says_nothing(bench) -> None:
    def twin(p) -> None:
        p.value("another", 1)

    program = bench.program(stepping, twins={"nonsense": twin})
    assert metamorphic(program, Eager("eager"), CPU) is None


def wave(p) -> None:
    """Eager holds three tensors at once: exp(sin(x)), which the backward reads; its product with the expanded
    gradient; cos(x). What it made before and what is read afterwards is larger.
    """
    x = p.leaf("x", p.randn(1 << 10, 64, requires_grad=True))
    p.randn(1 << 20)
    loss = p.compile(lambda x: x.sin().exp().sum())(x)
    with p.backward():
        loss.backward()
    p.value("copies", tuple(x for _ in range(8)))


TENSOR, SCALAR = 4 * (1 << 16), 4


@pytest.mark.parametrize(("subject", "tensors"), [("eager", 3), ("compile:inductor", 1)])
def test_the_peak_of_a_run_is_exact(bench, subject: str, tensors: int) -> None:
    """Inductor's code allocates without the dispatcher, and makes the gradient only."""
    program, subject = bench.program(wave), resolve(subject)
    seconds(program, subject, CPU)
    assert peak_bytes(program, subject, CPU) == tensors * TENSOR + 2 * SCALAR
    assert peak_bytes(program, subject, CPU) == tensors * TENSOR + 2 * SCALAR


def test_what_the_forward_frees_of_before_makes_room(bench) -> None:
    def body(p) -> None:
        x = p.leaf("x", p.randn(1 << 16, requires_grad=True))
        held = [torch.zeros(1 << 16)]

        def step(x):
            held.clear()
            return (x * 2).sum()

        loss = p.compile(step)(x)
        with p.backward():
            loss.backward()

    assert peak_bytes(bench.program(body), Eager("eager"), CPU) < 64  # scalars


def test_the_time_is_that_of_forward_and_backward(bench) -> None:
    def busy(amount: float) -> None:
        until = time.process_time() + amount
        while time.process_time() < until:
            pass

    def body(p) -> None:
        busy(0.2)
        x = p.leaf("x", p.randn(2, requires_grad=True))
        loss = p.compile(lambda x: (busy(0.03), x.sum())[1])(x)
        with p.backward():
            loss.backward()
            busy(0.02)
        busy(0.2)

    taken, _ = seconds(bench.program(body), Eager("eager"), CPU)
    assert 0.05 <= taken < 0.15


def test_a_short_program_is_not_slow(bench) -> None:
    assert slow(bench.program(stepping), Idle("s"), CPU) is None


def test_a_subject_that_compiles_in_every_run_is_not_slow(bench) -> None:
    class Both(Compiling, Idle):
        """Slow, but only because it compiles."""

    assert slow(bench.program(stepping), Both("s"), CPU, floor=0.0) is None


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
    row = judged(program, subject, CPU, ("leaks", "reuse"))
    assert (row.verdict, row.symptom, row.check) == (Verdict.DIVERGE, "leak", "leaks")
    assert row.signature


def test_checks_are_chosen_by_name() -> None:
    assert chosen(("all",)) == CHECKS
    assert list(chosen(("leaks", "reuse")).items()) == [("reuse", reuse), ("leaks", leaks)]
    with pytest.raises(UnknownNameError, match="unknown check 'luck'"):
        chosen(("luck",))
