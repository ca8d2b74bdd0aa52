"""A draft says what eager shows, literally, where the subject differs."""

from dataclasses import replace

import pytest
import torch

from gradparity.differential import Comparison
from gradparity.exhibit import exhibit
from gradparity.issue.markdown import Find, markdown
from gradparity.oracles.judge import judge
from gradparity.probe import Probe
from gradparity.verdict import row_of


def values(factor: float, count: int = 2):
    def body(p: Probe) -> None:
        x = p.leaf("x", p.tensor([[0.5] * count, [1.5] * count], requires_grad=True))
        (x * torch.tensor([[factor], [2.0]])).sum().backward()

    return body


def raising(text: str):
    def body(p: Probe) -> None:
        x = p.leaf("x", p.tensor([0.5], requires_grad=True))
        x.sum().backward()
        if text:
            raise ValueError(text)

    return body


def hooks(*sites: str):
    def body(p: Probe) -> None:
        for site in sites:
            p.event(site, kind="tensor")

    return body


def grad_of(make):
    def body(p: Probe) -> None:
        p.leaf("x", p.tensor([0.5, 1.0], requires_grad=True)).grad = make()

    return body


def effects(log: tuple = (), draws: bool = False, holds: bool = True, writes: int = 0, names=("y",)):
    def body(p: Probe) -> None:
        x = p.watch("w", p.tensor([0.5]))
        for _ in range(writes):
            x.mul_(1.0)
        p.log += log
        p.invariant("same mask", holds)
        for name in names:
            p.value(name, 1)
        if draws:
            torch.rand(1)

    return body


CASES = {
    "grad": (
        values(3.0),
        values(1.0),
        "`grad x` is a float32 tensor of shape (2, 2), strides (2, 1): [3, 3, 2, 2]",
    ),
    "a long one": (
        values(3.0, 9),
        values(1.0, 9),
        "`grad x` is a float32 tensor of shape (2, 9), strides (9, 1); element [0, 0] is 3, not 1",
    ),
    "no gradient": (grad_of(lambda: None), grad_of(lambda: torch.ones(2)), "`grad x` is None"),
    "NaN": (
        grad_of(lambda: torch.tensor([float("nan"), 1.0])),
        grad_of(lambda: torch.zeros(2)),
        "`grad x` is a float32 tensor of shape (2,), strides (1,): [nan, 1]",
    ),
    "raises": (raising("no such thing"), raising(""), "it raises `ValueError: no such thing`"),
    "raises nothing": (
        raising(""),
        raising("no"),
        "it raises nothing, and gives `x` a float32 tensor of shape (1,), strides (1,): [1]",
    ),
    "hooks": (
        hooks("a", "b", "a"),
        hooks("b", "a", "a"),
        "it calls, in this order: tensor a, tensor b, tensor a",
    ),
    "no hooks": (hooks(), hooks("b"), "it calls, in this order: nothing"),
    "log": (effects(("one", 2)), effects(("one", 3)), "the program logs 'one', 2"),
    "random": (effects(draws=True), effects(), "the run moves the state of torch's random numbers"),
    "invariant": (effects(), effects(holds=False), "these hold: same mask"),
    "version": (effects(writes=2), effects(), "the version counters rise: `w` by 2"),
    "names": (effects(names=("y", "z")), effects(), "the program shows y, z"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_draft_states_it(bench, name: str) -> None:
    eager, subject, expected = CASES[name]
    evidence = bench.evidence(bench.outcome(eager), bench.outcome(subject))
    found = judge(evidence)
    row = row_of(bench.case, "compile:mine", found.verdict, found.symptom, found.reason)
    shown = exhibit(Comparison(row, evidence))
    assert shown["expected"] == expected
    draft = markdown(Find(replace(row, exhibit=shown), "A program.", "pass", "torch 2"))
    assert f"**Expected**: as in eager, {expected}.\n\n**The program**: A program." in draft
