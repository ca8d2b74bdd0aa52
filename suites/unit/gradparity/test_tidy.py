"""tidy: what libraries keep is dropped, and a worker's memory does not grow with the programs that it ran."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradparity.case import Case
from gradparity.corpus.generated import scripted
from gradparity.generate.draw import drawn
from gradparity.generate.kinds.samples import _samples
from gradparity.observe import observe
from gradparity.probe import Body, Probe
from gradparity.subjects.registry import resolve
from gradparity.tidy import EVERY, tidy, tidy_now_and_then

CPU = torch.device("cpu")


def _live() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def _grown(run: Callable[[], object], times: int = 5) -> int:
    """How many tensors some further runs leave."""
    run()
    before = _live()
    for _ in range(times):
        run()
    return _live() - before


def _hooked(p: Probe) -> None:
    """A hook of an intermediate holds the probe, which holds the leaf; the gradient has a graph."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    y.register_hook(p.hook("y", lambda grad: grad * x))
    with p.backward():
        y.sum().backward(create_graph=True)


def _hooked_together(p: Probe) -> None:
    """A hook of two leaves holds the nodes that accumulate into them."""
    x, y = p.leaf("x", p.randn(3, requires_grad=True)), p.leaf("y", p.randn(3, requires_grad=True))
    torch.autograd.graph.register_multi_grad_hook((x, y), p.hook("both", kind="multi"), mode="all")
    with p.backward():
        (x * y).sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("body", [_hooked, _hooked_together])
def test_a_program_that_ran_leaves_no_tensors(body: Body) -> None:
    case = Case("test", "hooked")
    assert _grown(lambda: observe(case, body, resolve("eager"), torch.float32, CPU)) <= 0


@pytest.mark.parametrize("policy", ["islands", "functions", "hooks"])
def test_a_drawing_leaves_no_tensors(policy: str) -> None:
    seeds = iter(range(10, 16))  # others have hooks that pack a result as itself, a cycle that torch keeps

    def run() -> None:
        drawn(policy, next(seeds))
        _samples.cache_clear()  # it holds the samples of each operator that was drawn

    assert _grown(run) <= 0


def test_samples_that_cannot_be_written_are_not_kept() -> None:
    kept = [
        each for sample in _samples("grid_sampler_3d") for each in sample if isinstance(each, torch.Tensor)
    ]
    assert all(each.numel() <= 2048 for each in kept)


def test_what_torch_keeps_of_programs_is_dropped() -> None:
    case = Case("generated", "elementwise", 0)
    subject = resolve("compile:aot_eager")
    subject.reset(True)
    observe(case, scripted(case, drawn("elementwise", 0)).body, subject, torch.float32, CPU)
    assert len(FakeTensorMode.cache) > 0
    assert any(name.startswith("<eval_with_key>") for name in linecache.cache)
    tidy()
    assert len(FakeTensorMode.cache) == 0
    assert not any(name.startswith("<eval_with_key>") for name in linecache.cache)


def test_it_happens_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr("gradparity.tidy.tidy", lambda: done.append(1))
    for step in range(2 * EVERY):
        tidy_now_and_then(step)
    assert len(done) == 2
