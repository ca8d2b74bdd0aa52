"""Small backwards that are slower compiled than eager step aside, and say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any

import pytest
import torch

import retrograd
from retrograd import policy
from retrograd.backends.registry import AtenBackend
from retrograd.live.session import Session
from retrograd.specialize import profitability as pace

pytestmark = pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose code is timed, and takes longer than eager, whatever this machine does meanwhile."""
    monkeypatch.setattr(AtenBackend, "for_speed", True)
    run = Session._run
    now = [0.0]

    def slow(self: Any, *given: Any) -> Any:
        now[0] += 1e-3
        return run(self, *given)

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(Session, "_run", slow)
    monkeypatch.setattr(pace.time, "perf_counter", clock)


def train(context: Callable[[], AbstractContextManager[Any]], steps: int = 120) -> None:
    w = torch.ones(3, requires_grad=True)
    for _ in range(steps):
        w.grad = None
        with context():
            (w * w).sum().backward()
        assert torch.equal(w.grad, torch.full((3,), 2.0))


def test_a_backward_that_is_slower_compiled_runs_eagerly_from_then_on(timed: None) -> None:
    context = retrograd.compiled_autograd("aten")
    train(lambda: context)
    (reason,) = context.explain().fallbacks
    assert reason.code == "slower-than-eager"
    assert "below SumBackward0 takes 1.00 ms compiled and 0.00 ms eager" in reason.text
    assert retrograd.counters["runs"] < 30  # once suspected, it waits in eager for the second measurement


def test_contexts_that_each_step_makes_anew_learn_from_each_other(timed: None) -> None:
    train(lambda: retrograd.compiled_autograd("aten"))
    assert retrograd.counters["runs"] < 30
    assert [reason.code for reason in retrograd.explain().fallbacks] == ["slower-than-eager"]
    runs = retrograd.counters["runs"]
    train(lambda: retrograd.compiled_autograd("aten"), steps=10)  # another place
    assert runs < retrograd.counters["runs"]


def test_nothing_is_decided_by_a_clock_under_deterministic_algorithms(timed: None) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        context = retrograd.compiled_autograd("aten")
        train(lambda: context)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not context.explain().fallbacks
    assert retrograd.counters["runs"] == 120


@pytest.mark.parametrize(("backend", "strict"), [("eager", False), ("aten", True)])
def test_what_was_asked_for_is_not_measured(timed: None, backend: str, strict: bool) -> None:
    """Who asks for strictness, or for the eager lowering, does not ask for speed."""
    context = retrograd.compiled_autograd(backend, strict=strict)
    train(lambda: context)
    assert retrograd.counters["runs"] == 120


@pytest.mark.parametrize(("short", "is_measured"), [(policy.SHORT, False), (policy.SHORT_STEP, True)])
def test_a_step_of_a_tenth_of_a_second_is_measured_and_such_a_backward_is_not(
    short: float, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, runs = paced(short, monkeypatch, [0.1] * 100, repeat(0.05))
    assert (measured.disabled is not None) == is_measured
    assert all(runs) == (not is_measured)
    assert runs[-1] == (not is_measured)


@pytest.mark.parametrize(
    ("loss", "strict", "runs"),
    [
        (lambda out: out, False, 0),
        (lambda out: out * 2, False, 0),
        (lambda out: (out * 2).exp(), False, 3),
        (lambda out: out, True, 3),
    ],
    ids=["nothing", "one node", "two nodes", "strict"],
)
def test_what_a_compiled_forward_brings_is_compiled_already(
    loss: Callable[[torch.Tensor], torch.Tensor],
    strict: bool,
    runs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AtenBackend, "for_speed", True)
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(5)])
    compiled = retrograd.compile(lambda x: model(x).sum(), backend="aten", options={"strict": strict})
    x, retrograd.counters["runs"] = torch.ones(2, 3), 0
    for forward in (lambda x: model(x).sum(), *[compiled] * 3):
        model.zero_grad()
        loss(forward(x)).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        if forward is not compiled:
            wanted = grads
        assert all(map(torch.equal, grads, wanted))  # type: ignore[arg-type]
    assert retrograd.counters["runs"] == runs
    assert not retrograd.explain().fallbacks
    assert ("compiled-already" in str(retrograd.explain().notes)) == (runs == 0)


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_backward_with_more_compiled_functions_than_other_nodes_runs_on_the_engine(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Dynamo cuts a model at each layer: the live path would call each layer as Python code."""
    monkeypatch.setattr(AtenBackend, "for_speed", True)
    layer = retrograd.compile(lambda x: x.sin().cos(), backend="aten")
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        retrograd.counters["runs"] = 0
        loss = layer(layer(x).exp()).sum()
        for _ in range(nodes - 2):
            loss = loss * 2
        loss.backward()
    assert retrograd.counters["runs"] == (nodes > 2)


def test_the_report_says_that_backwards_are_measured_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AtenBackend, "for_speed", True)
    x = torch.ones(2, requires_grad=True)
    with retrograd.compiled_autograd(backend="aten") as compiled:
        for _ in range(pace.STEADY + 6):
            x.sin().cos().exp().sum().backward()
    assert compiled.explain().backwards[0].runs < pace.STEADY + 6
    assert "[measured]" in str(compiled.explain())
    assert not compiled.explain().fallbacks


def paced(
    short: float, monkeypatch: pytest.MonkeyPatch, compiled: list[float], eager: Iterable[float]
) -> tuple[pace.Pace, list[bool]]:
    """Calls that take so many seconds, and which of them ran compiled."""
    now = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    measured = pace.Pace("it", "step", short)
    runs = []
    for seconds, otherwise in zip(compiled, eager, strict=False):
        runs.append(measured.is_worth_compiling())
        with measured.timed(runs[-1], lambda: 0):
            now[0] += seconds if runs[-1] else otherwise
    return measured, runs


@pytest.mark.parametrize(
    "compiled", [[0.1] * 30 + [0.04] * 90, [0.1, 0.04] * 60], ids=["a slow beginning", "now and then"]
)
def test_a_machine_that_is_busy_for_a_while_decides_nothing(
    compiled: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, runs = paced(policy.SHORT_STEP, monkeypatch, compiled, repeat(0.05))
    assert measured.disabled is None
    assert all(runs[-20:])


@pytest.mark.parametrize("sizes", [(1, 2), (3, 2, 4), (1, 5, 2, 4, 3, 6)], ids=len)
@pytest.mark.parametrize("is_slower", [False, True])
def test_sizes_in_turn_do_not_count(
    sizes: tuple[int, ...], is_slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loader brings batches of several lengths: both kinds of calls meet each of them as often."""
    quick = [1e-3 * size for size in sizes * 60]
    slow = [1.1 * seconds for seconds in quick]
    compiled, eager = (slow, quick) if is_slower else (quick, slow)
    measured, _ = paced(policy.SHORT, monkeypatch, compiled, eager)
    assert (measured.disabled is not None) == is_slower


def test_one_call_that_was_quick_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = [0.06] * 60
    compiled[pace.STEADY + 1] = 0.04
    measured, _ = paced(policy.SHORT, monkeypatch, compiled + [0.06] * 60, repeat(0.05))
    assert measured.disabled is not None


@pytest.mark.parametrize("before", [pace.STEADY, 8], ids=["the first that is measured", "later"])
def test_one_long_call_among_short_ones_ends_no_measurement(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection, or another process, may interrupt any call."""
    compiled = [0.05] * before + [0.5] + [0.05] * 110
    measured, _ = paced(policy.SHORT, monkeypatch, compiled, repeat(0.01))
    assert measured.disabled is not None


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_a_step_that_is_recorded_is_not_compared_with_eager(cudagraphs: bool) -> None:
    weight, eager = torch.ones(3, requires_grad=True), []

    def run() -> None:
        if not torch.compiler.is_compiling():
            eager.append(weight)
        (weight * weight).sum().backward()

    step = retrograd.compile_step(run, backend="eager", cudagraphs=cudagraphs, strict=True)
    for _ in range(20):
        step()
    assert step.explain().calls == 20
    assert len(eager) == step.explain().eager
    assert (step.explain().eager == 1) == cudagraphs
