"""Random numbers: what a capture leaves whole, and in what order numbers are drawn."""

from __future__ import annotations

import itertools

import pytest
import torch
from suites.unit.retrograd.aot.against_eager import tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from retrograd import aot
from retrograd.aot import compiler
from retrograd.backends import registry
from retrograd.errors import CaptureError


def drawn(fn, x):
    torch.manual_seed(3)
    return fn(x)


@pytest.mark.parametrize("fill", ["bernoulli_", "uniform_", "normal_", "exponential_", "geometric_"])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_numbers_are_drawn_into_memory_as_eager_lays_it_out(fill, needs_grad):
    x = tensor(6, 8, 10, grad=needs_grad)

    def noisy(x):
        noise = torch.empty(10, 6, 8).permute(1, 2, 0)
        return x * (noise.geometric_(0.3) if fill == "geometric_" else getattr(noise, fill)())

    assert torch.equal(drawn(aot.function(noisy, backend="eager"), x), drawn(noisy, x))


def test_numbers_that_are_drawn_again_in_the_backward_are_the_same():
    x = tensor(6, 8, 10, grad=True)
    call = aot.function(
        lambda x: functional.dropout(x.mT.sin(), 0.5).exp(), backend="eager", partitioner="recompute_all"
    )
    out = drawn(call, x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    kept = out.mT != 1
    assert torch.equal(grad != 0, kept)
    assert kept.any()


def test_what_the_backward_draws_again_the_forward_draws_once():
    state = aot.create_state(lambda x: functional.dropout(x.sin(), 0.5).exp(), (tensor(4, grad=True),))
    parts = aot.partition(aot.capture(state), "recompute_all")
    forward, backward = (
        [str(node.target) for node in gm.graph.nodes] for gm in (parts.forward, parts.backwards[0].gm)
    )
    assert "run_and_save_rng_state" in forward
    assert "run_with_rng_state" not in forward
    assert "run_with_rng_state" in backward


@pytest.mark.parametrize("numbers", ["inductor's", "eager's"])
def test_a_checkpoint_with_dropout_is_compiled_by_inductor(numbers):
    x = tensor(6, 8, grad=True)
    call = torch.compile(
        lambda x: checkpoint(lambda h: functional.dropout(h.exp(), 0.5), x, use_reentrant=False),
        backend="retrograd",
        options={"strict": True},
    )
    with torch._inductor.config.patch(fallback_random=numbers == "eager's"):
        out = call(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, out)
    assert 0 < (out == 0).sum() < out.numel()


def layers(draw=functional.dropout):
    def block(h):
        return draw(h.exp(), 0.5).sin()

    def run(x):
        for _ in range(3):
            x = checkpoint(block, x, use_reentrant=False)
        return x

    return run


def targets_of(gm):
    return [str(node.target) for node in gm.graph.nodes]


@pytest.fixture
def parts(monkeypatch):
    """The partitions that are made."""
    made = []
    original = compiler.partition_for
    monkeypatch.setattr(compiler, "partition_for", lambda *args: made.append(original(*args)) or made[-1])
    return made


def test_inductor_computes_a_checkpoints_numbers_from_seeds(parts):
    call = aot.function(layers(), backend="inductor")
    x = tensor(6, 8, grad=True)
    call(x).sum().backward()
    forward, backward = targets_of(parts[0].forward), targets_of(parts[0].backwards[0].gm)
    assert forward.count("prims.inductor_seed.default") == 3
    assert backward.count("prims.inductor_random.default") == 3
    assert not {"run_and_save_rng_state", "run_with_rng_state"} & {*forward, *backward}


@pytest.mark.filterwarnings("ignore:a graph was interpreted")
@pytest.mark.parametrize("broken", ["forward", "backward", "both"])
def test_both_halves_draw_the_same_numbers_whichever_is_interpreted(broken, monkeypatch):
    """The gradient of `dropout(exp(x))` is its result; a mask that differs would show."""
    compile_graph, is_on = registry.compile_graph, []

    def sometimes(gm, inputs, **half):
        code = compile_graph(gm, inputs, **half)
        which = "backward" if half["is_backward"] else "forward"

        def run(args):
            if is_on and broken in (which, "both"):
                raise RuntimeError("no")
            return code(args)

        run._boxed_call = True
        return run

    monkeypatch.setattr(registry, "compile_graph", sometimes)
    call = aot.function(
        lambda x: checkpoint(lambda h: functional.dropout(h.exp(), 0.5), x, use_reentrant=False)
    )
    x = tensor(6, 8, grad=True)
    for _ in range(3):
        out = call(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, out)
        is_on.append(True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_seeds_serve_every_precision(dtype, parts):
    call = aot.function(
        lambda x: checkpoint(lambda h: functional.dropout(h.exp(), 0.5), x, use_reentrant=False)
    )
    x = tensor(6, 8, grad=True).detach().to(dtype).requires_grad_()
    out = call(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], out)
    assert "prims.inductor_random.default" in targets_of(parts[0].backwards[0].gm)
    assert 0 < (out == 0).sum() < out.numel()


def test_two_calls_and_two_draws_have_numbers_of_their_own():
    call = aot.function(lambda x: torch.stack([layers()(x), layers()(x)]))
    x = tensor(64, 8, grad=True)
    first, second = call(x), call(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    grads = [torch.autograd.grad(out.sum(), x)[0] for out in (second, first)]  # in the other order
    assert not torch.equal(*grads)


def test_seeds_serve_sizes_that_change():
    call = aot.function(
        lambda x: checkpoint(lambda h: functional.dropout(h.exp(), 0.5), x, use_reentrant=False), dynamic=True
    )
    for rows in (6, 9):
        x = tensor(rows, 8, grad=True)
        out = call(x)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], out)


def test_a_seed_makes_compiled_checkpoints_repeat():
    call = aot.function(layers())
    x = tensor(64, 8, grad=True)
    call(x)
    runs = [drawn(lambda x: torch.autograd.grad(call(x).sum(), x)[0], x) for _ in range(2)]
    assert torch.equal(*runs)


@pytest.mark.parametrize("draw", [
    lambda h, p: h + torch.randn_like(h),
    lambda h, p: h * torch.rand(h.shape, dtype=torch.float64).to(h.dtype),
    lambda h, p: h * torch.randint(2, h.shape),
], ids=["randn", "float64", "randint"])  # fmt: skip
def test_what_is_drawn_otherwise_is_drawn_again_alike(draw):
    """`exp(a)` has the derivative `exp(a) * da/dx`, and the backward computes the draw in both again."""
    call = aot.function(lambda x: checkpoint(lambda h: draw(h, 0.5).exp(), x, use_reentrant=False))
    x = tensor(6, 8, grad=True)
    out = call(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    adds = bool(draw(torch.zeros(6, 8), 0.5).any())
    torch.testing.assert_close(grad, out if adds else out * out.log() / x)


@torch.library.custom_op(
    "random_tests::two_factors", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def two_factors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As attention with dropout, one call with several results that generated code cannot compute."""
    return torch.rand_like(x), torch.rand_like(x)


@two_factors.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x)


@pytest.mark.parametrize("uses", ["both", "second", "overwritten"])
def test_results_that_inductor_does_not_compute_itself_are_saved(uses, parts):
    def noisy(h):
        first, second = torch.ops.random_tests.two_factors(h.detach())
        out = h * second * (first if uses == "both" else 1)
        return (out, second) if uses == "overwritten" else (out, second.clone())

    call = aot.function(lambda x: checkpoint(noisy, x, use_reentrant=False))
    x = tensor(6, 8, grad=True)
    out, second = call(x)
    if uses == "overwritten":
        second.zero_()  # eager computes it again
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad * x, out)
    graphs = [parts[0].forward, parts[0].backwards[0].gm]
    assert not any(target.startswith("run_") for graph in graphs for target in targets_of(graph))


def masked(x):
    """Its gradient is `out / x`, whatever is dropped."""
    return functional.dropout(x * 2, 0.5)


def checkpointed(x):
    return checkpoint(masked, x, use_reentrant=False)


@pytest.mark.parametrize("fn", [masked, checkpointed])
def test_no_backward_runs_with_other_numbers_than_inductor_drew(fn):
    """The re-run of the call in eager mode would draw eager's numbers."""
    call = aot.function(fn)
    for memory in [None, *itertools.permutations(range(3))]:
        x = torch.rand(4, 5, 6).add_(1).requires_grad_()
        out = call(x)
        seed = torch.ones(4, 5, 6)
        if memory is not None:
            seed = torch.empty_permuted((4, 5, 6), memory).fill_(1)
        (grad,) = torch.autograd.grad(out, x, seed, retain_graph=True)
        torch.testing.assert_close(grad * x, out)
    (grad,) = torch.autograd.grad(out, x, torch.ones(()).expand(4, 5, 6), retain_graph=True)
    torch.testing.assert_close(grad * x, out)
    (rows,) = torch.autograd.grad(out, x, torch.ones(2, 4, 5, 6), is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(rows * x, torch.stack([out, out]))
    with torch.autograd.set_detect_anomaly(True):
        (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    torch.testing.assert_close(grad * x, out)
    with torch.autocast("cpu", torch.bfloat16):
        (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        torch.testing.assert_close(grad * x, out)
        inside = call(x)
        (grad,) = torch.autograd.grad(inside.sum(), x)
    torch.testing.assert_close(grad * x, inside)
    with pytest.raises(CaptureError, match="other random numbers than eager") as found:
        torch.autograd.grad(out.sum(), x, create_graph=True)
    assert "fallback_random" in str(found.value)


def test_second_derivatives_see_eagers_numbers_where_inductor_draws_them():
    x = torch.rand(4, 5).add_(1).requires_grad_()
    with torch._inductor.config.patch(fallback_random=True):
        out = aot.function(lambda x: masked(x) ** 2)(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.testing.assert_close(grad * x / 2, out)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), x)[0] * x**2 / 2, out)


def test_a_code_generator_gets_a_dropout_in_one_piece():
    state = aot.create_state(
        lambda x: functional.dropout(x, 0.1), (tensor(4),), decompositions={torch.ops.aten.silu.default: None}
    )
    targets = {str(node.target) for node in aot.capture(state).gm.graph.nodes}
    assert "aten.native_dropout.default" in targets
    assert "aten.bernoulli.p" not in targets


@pytest.mark.parametrize(
    "mask",
    [lambda a: functional.dropout(a, 0.1), lambda a: a * torch.empty_like(a).bernoulli_(0.9)],
)
def test_attention_with_dropout_under_inductor_is_finite(mask):
    a, b = tensor(4, 2, 16, 16, grad=True), tensor(4, 2, 16, 8, grad=True)
    out = aot.function(lambda a, b: mask(a.softmax(-1)) @ b)(a, b)
    out.sum().backward()
    assert out.isfinite().all()
    assert out.abs().max() < 10
    assert a.grad.isfinite().all()
    assert b.grad.isfinite().all()


@torch.library.custom_op(
    "retrograd_tests::noise_like", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise_like(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@noise_like.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    with unset_fake_temporarily():  # as operators do that have a kernel only: it runs on zeros
        torch.rand(1)
    return torch.empty_like(x)


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * noise_like(grad)


def test_fakes_that_draw_numbers_leave_generators_alone():
    found = []
    for call in (NoisyBackward.apply, aot.function(NoisyBackward.apply, backend="eager", strict=True)):
        torch.manual_seed(3)
        x = tensor(4, grad=True)
        out = call(x)
        behind = torch.get_rng_state()
        out.sum().backward()
        found.append([out.detach(), x.grad, behind, torch.get_rng_state()])
    assert all(map(torch.equal, *found))
