"""Code that raises where eager does not, or is not there in time: the user's step goes on."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from suites.unit.retrograd.aot.against_eager import leaf, tensor
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd import aot
from retrograd.backends.background import wait_for_all
from retrograd.errors import FallbackWarning

pytestmark = pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")


class Broken:
    """Fails at one operator: when it is compiled or when it runs, always or so many times."""

    def __init__(self, operator, times=100, at="run"):
        self.operator, self.left, self.at = operator, times, at
        self.runs = 0

    def fail(self):
        if self.left:
            self.left -= 1
            raise RuntimeError("no kernel")

    def __call__(self, gm, inputs):
        if not any(self.operator in str(node.target) for node in gm.graph.nodes):
            return gm.forward
        if self.at == "compile":
            self.fail()

        def run(*args):
            self.runs += 1
            if self.at == "run":
                self.fail()
            return gm(*args)

        return run


def fn(x):
    return x.sin() * x


def trained(call, steps=4):
    x = leaf(3)
    for _ in range(steps):
        call(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("at", ["run", "compile"])
@pytest.mark.parametrize("operator", ["sin", "cos"])
@pytest.mark.parametrize("times", [1, 100])
def test_an_error_that_eager_has_not_never_reaches_the_user(operator, at, times):
    retrograd.reset()
    call = aot.function(fn, backend=Broken(operator, times, at))
    assert torch.equal(trained(call), trained(fn))
    assert "no kernel" in str(retrograd.explain())


@pytest.mark.parametrize("operator", ["sin", "cos"])
def test_code_that_keeps_failing_is_given_up(operator):
    backend = Broken(operator)
    call = aot.function(fn, backend=backend)
    assert torch.equal(trained(call, 6), trained(fn, 6))
    assert backend.runs == 2


class Late:
    """Works but for its `nth` run; perhaps changes its first input before it raises."""

    def __init__(self, operator, nth, changes=False):
        self.operator, self.nth, self.changes = operator, nth, changes
        self.runs = 0

    def __call__(self, gm, inputs):
        if not any(self.operator in str(node.target) for node in gm.graph.nodes):
            return gm.forward

        def run(*args):
            self.runs += 1
            if self.runs == self.nth:
                if self.changes:
                    args[0].add_(1)
                raise RuntimeError("no kernel")
            return gm(*args)

        return run


def twice(x):
    return (x * 2).sin() * x


@pytest.mark.parametrize("operator", ["sin", "cos"])
@pytest.mark.parametrize("nth", [2, 3])
@pytest.mark.parametrize("way", ["aot", "compile"])
def test_code_that_fails_in_a_later_run_costs_that_run_only(operator, nth, way):
    retrograd.reset()
    backend = Late(operator, nth)
    if way == "aot":
        call = aot.function(twice, backend=backend)
    else:
        call = torch.compile(twice, backend="retrograd", options={"backend": backend})
    assert torch.equal(trained(call), trained(twice))
    assert backend.runs in (4, 8)  # in one half of the function, or in both
    assert "no kernel" in str(retrograd.explain())


@pytest.mark.parametrize(("changes", "strict"), [(True, False), (False, True)])
def test_a_later_failure_that_changed_something_is_raised_and_one_under_strict(changes, strict):
    call = aot.function(twice, backend=Late("cos", 3, changes), strict=strict)
    with pytest.raises(RuntimeError, match="no kernel"):
        trained(call)


@pytest.mark.parametrize("operator", ["sin", "cos"])
def test_strict_means_that_it_reaches_the_user(operator):
    with pytest.raises(RuntimeError, match="no kernel"):
        trained(aot.function(fn, backend=Broken(operator), strict=True))


def test_an_error_that_eager_has_too_leaves_what_eager_leaves():
    def change(x, i, count):
        count.add_(1)
        return x[i] * 1

    call, x = aot.function(change, backend="eager"), leaf(3)
    count = torch.zeros(1)
    call(x, torch.tensor([0]), count)
    with pytest.raises(IndexError):
        call(x, torch.tensor([9]), count)
    assert count.item() == 2


def test_numbers_that_failed_code_has_drawn_are_drawn_again():
    def noisy(x):
        return torch.nn.functional.dropout(x, 0.5).sin()

    x = tensor(64)
    torch.manual_seed(3)
    out = aot.function(noisy, backend=Broken("sin"))(x)
    torch.manual_seed(3)
    assert torch.equal(out, noisy(x))


class Noisy(torch.autograd.Function):
    """Draws forward and backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.rand_like(grad) * x.cos()


def shuffled(x):
    return x[torch.randperm(len(x))].sin() * torch.rand_like(x)


NOISY = {
    "drawn in both": lambda x: Noisy.apply(x).sin(),
    "state kept for the backward": lambda x: checkpoint(shuffled, x, use_reentrant=False),
}


class Drawing(Broken):
    """Works in its first runs; fails when it has drawn what its graph draws."""

    def __init__(self, operator, good):
        super().__init__(operator, 1)
        self.good = good

    def __call__(self, gm, inputs):
        self.gm = gm
        return super().__call__(gm, inputs)

    def fail(self):
        if self.runs > self.good and self.left:
            if "= torch.ops.aten.rand" in self.gm.code or "run_and_save_rng" in self.gm.code:
                torch.rand(5)
            super().fail()


@pytest.mark.parametrize("program", NOISY)
@pytest.mark.parametrize("operator", ["sin", "cos"])
@pytest.mark.parametrize("good", [0, 2])
@pytest.mark.parametrize("way", ["aot", "compile", "live"])
def test_code_that_draws_and_fails_draws_as_eager(program, operator, good, way):
    retrograd.reset()
    torch._dynamo.reset()
    fn, backend = NOISY[program], Drawing(operator, good)
    call = fn
    if way == "aot":
        call = aot.function(fn, backend=backend)
    elif way == "compile":
        call = torch.compile(fn, backend="retrograd", options={"backend": backend})
    found = []
    for one in (call, fn):
        x = leaf(3)
        torch.manual_seed(3)
        for _ in range(4):
            out = one(x).sum()
            is_compiled = way == "live" and not found
            with retrograd.compiled_autograd(backend=backend) if is_compiled else nullcontext():
                out.backward()
        found.append((x.grad, torch.rand(2)))
    torch.testing.assert_close(*found)
    assert backend.left == 0 or way == "live"


def test_a_slow_compilation_goes_on_in_the_background():
    may_end = threading.Event()

    def slow(gm, inputs):
        assert may_end.wait(60)
        return gm.forward

    retrograd.reset()
    call = aot.function(fn, backend=slow, compile_timeout=0.05)
    assert torch.equal(trained(call, 2), trained(fn, 2))
    assert any(reason.code == "compile-timeout" for reason in retrograd.explain().fallbacks)
    may_end.set()
    assert wait_for_all(60)
    before = retrograd.counters["aot_fallbacks"]
    x = tensor(3)
    assert torch.equal(call(x.requires_grad_(False)), fn(x))
    trained(call)
    assert wait_for_all(60)
    before = retrograd.counters["aot_fallbacks"]
    assert torch.equal(trained(call), trained(fn))
    assert retrograd.counters["aot_fallbacks"] == before


def test_what_is_ready_in_time_is_used_at_once():
    call = aot.function(fn, backend=lambda gm, inputs: gm.forward, compile_timeout=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert torch.equal(trained(call), trained(fn))
