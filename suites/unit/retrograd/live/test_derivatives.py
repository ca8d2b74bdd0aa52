"""A differentiable backward runs on the stock engine; the backward through what it leaves is compiled."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import retrograd
from retrograd.backends.registry import AtenBackend

Program = Callable[[], Sequence[Tensor | None]]


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def agree(program: Program, *, strict: bool = True, **settings: object) -> retrograd.CompiledAutograd:
    """The program gives what it gives in eager, with equal ``requires_grad``; returns the context."""
    expected = program()
    context = retrograd.compiled_autograd("aten", strict=strict, **settings)  # type: ignore[arg-type]
    with context:
        results = program()
    assert [r is None or r.requires_grad for r in results] == [e is None or e.requires_grad for e in expected]
    torch.testing.assert_close(list(results), list(expected))
    return context


def lowerings(context: retrograd.CompiledAutograd, *, are_interpreted: bool) -> list[str]:
    every = [low for backward in context.report.backwards for low in backward.lowerings]
    return [low.because for low in every if (low.how == "interpreted") is are_interpreted]


def interpreted(context: retrograd.CompiledAutograd) -> list[str]:
    return lowerings(context, are_interpreted=True)


def is_compiled_at_the_end(context: retrograd.CompiledAutograd) -> bool:
    """Whether nothing is interpreted, something is compiled, and the differentiable backward is told of."""
    told = [reason.code for reason in context.report.notes] == ["differentiable"]
    return told and not interpreted(context) and bool(lowerings(context, are_interpreted=False))


def energy(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x.exp()).pow(3).sum()


def test_of_three_orders_the_last_is_compiled() -> None:
    def program() -> list[Tensor]:
        value, results = energy(x, w), []
        for order in range(3):
            grads = torch.autograd.grad(value, (x, w), create_graph=order < 2)
            value = sum((grad * grad).sum() for grad in grads)
            results += grads
        return results

    x, w = leaves((3, 3), (3, 3))
    context = agree(program)
    found = [[low.because for low in backward.lowerings] for backward in context.report.backwards]
    assert found == [["first use"]]


def test_a_second_run_compiles_nothing() -> None:
    def program() -> list[Tensor]:
        (grad,) = torch.autograd.grad(energy(x, w), x, create_graph=True)
        return list(torch.autograd.grad(grad.pow(2).sum(), (x, w)))

    x, w = leaves((3, 3), (3, 3))
    agree(program)
    retrograd.reset()
    with retrograd.compiled_autograd("aten", strict=True):
        program()
        before = retrograd.counters["lowerings"]
        program()
    assert before > 0
    assert retrograd.counters["lowerings"] == before


def test_gradcheck_and_gradgradcheck_pass_in_a_context() -> None:
    x, w = leaves((3, 3), (3, 3))
    with retrograd.compiled_autograd("aten", strict=True):
        assert gradcheck(energy, (x, w))
        assert gradgradcheck(energy, (x, w))
        assert gradgradcheck(lambda a, b: (a @ b).sigmoid() * b, (x, w))


def test_inductor_is_differentiable_too() -> None:
    def program() -> list[Tensor]:
        (grad,) = torch.autograd.grad(energy(x, w), x, create_graph=True)
        return [grad, *torch.autograd.grad(grad.pow(2).sum(), (x, w))]

    x, w = leaves((3, 3), (3, 3))
    expected = program()
    with retrograd.compiled_autograd("inductor", strict=True) as context:
        torch.testing.assert_close(program(), expected)
    assert is_compiled_at_the_end(context)


def test_backend_eager_interprets_and_is_equal_to_the_bit() -> None:
    x, w = leaves((3, 3), (3, 3), dtype=torch.float32)
    (expected,) = torch.autograd.grad(energy(x, w), x, create_graph=True)
    with retrograd.compiled_autograd("eager", strict=True):
        (grad,) = torch.autograd.grad(energy(x, w), x, create_graph=True)
    assert torch.equal(grad, expected)
    assert type(grad.grad_fn) is type(expected.grad_fn)


def test_a_hook_between_segments_is_differentiated() -> None:
    def program() -> list[Tensor]:
        y = x.exp()
        y.register_hook(lambda grad: grad * x.sin())
        (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return [grad, *torch.autograd.grad(grad.sum(), x)]

    (x,) = leaves((3,))
    assert is_compiled_at_the_end(agree(program))


def test_mutating_formulas_are_functionalised_with_their_history() -> None:
    def program() -> list[Tensor]:
        y = (x * 2).clone()
        y[:, 0].mul_(w[:, 1])
        grads = torch.autograd.grad((y.exp() * y).sum(), (x, w), create_graph=True)
        return [*grads, *torch.autograd.grad(sum((g * g).sum() for g in grads), (x, w))]

    x, w = leaves((4, 3), (4, 3))
    assert is_compiled_at_the_end(agree(program))


def test_the_same_tensor_twice_gets_both_contributions() -> None:
    def program() -> list[Tensor]:
        (grad,) = torch.autograd.grad((x.exp() * x * x * y).sum(), x, create_graph=True)
        return [*torch.autograd.grad((grad.exp() * y).sum(), (x, y))]

    x, y = leaves((3,), (3,))
    assert is_compiled_at_the_end(agree(program))


def test_an_argument_computed_from_another_is_not_differentiated_through() -> None:
    def program() -> list[Tensor]:
        a = x.exp()
        b = a * x
        grads = torch.autograd.grad((a * b * x).sum(), (a, b, x), create_graph=True)
        return [*torch.autograd.grad(sum((g * g).sum() for g in grads), x)]

    (x,) = leaves((3,))
    agree(program)


def test_gradients_that_share_nothing_are_freed_apart() -> None:
    def program() -> list[Tensor]:
        loss = (x.exp() * x).sum() + (y.sin() * y).sum()
        gx, gy = torch.autograd.grad(loss, (x, y), create_graph=True)
        return [*torch.autograd.grad(gx.sum(), x), *torch.autograd.grad(gy.sum(), y)]

    x, y = leaves((3,), (3,))
    assert is_compiled_at_the_end(agree(program))


@pytest.mark.parametrize("context", [contextlib.nullcontext(), retrograd.compiled_autograd("aten")])
def test_a_freed_gradient_raises(context: contextlib.AbstractContextManager[object]) -> None:
    (x,) = leaves((3,))
    with context:
        (grad,) = torch.autograd.grad((x.exp() * x.sin()).sum(), x, create_graph=True)
        grad.sum().backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            grad.sum().backward()


@pytest.mark.parametrize("context", [contextlib.nullcontext(), retrograd.compiled_autograd("aten")])
def test_what_eager_saves_must_not_change(context: contextlib.AbstractContextManager[object]) -> None:
    x, y = leaves((3,), (3,))
    with context:
        (grad,) = torch.autograd.grad((x.exp() * y).pow(2).sum(), x, create_graph=True)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad.sum().backward()


def test_what_eager_does_not_save_may_change() -> None:
    def program() -> list[Tensor]:
        (x,) = leaves((3,))
        (grad,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
        with torch.no_grad():
            x.add_(1)
        return list(torch.autograd.grad(grad.sum(), x))

    assert is_compiled_at_the_end(agree(program))


def test_a_missing_derivative_is_missed_when_it_is_asked_for() -> None:
    log_probs = torch.randn(5, 2, 4, dtype=torch.float64).log_softmax(-1).requires_grad_()
    targets, lengths = torch.tensor([[1, 2], [3, 1]]), (torch.tensor([5, 5]), torch.tensor([2, 2]))
    loss = torch.nn.functional.ctc_loss(log_probs, targets, *lengths)
    with retrograd.compiled_autograd("aten") as context:
        (grad,) = torch.autograd.grad(loss, log_probs, create_graph=True)
        assert grad.requires_grad
        with pytest.raises(RuntimeError, match="is not implemented"):
            grad.sum().backward()
    assert not interpreted(context)


def test_saved_tensor_hooks_see_what_they_see_in_eager() -> None:
    def packed(context: contextlib.AbstractContextManager[object]) -> int:
        (x,) = leaves((3,))
        count: list[Tensor] = []
        loss = (x.exp() * x).sum()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (count.append(t), t)[1], lambda t: t)
        with context, hooks:
            torch.autograd.grad(loss, x, create_graph=True)
        return len(count)

    context = retrograd.compiled_autograd("aten", strict=True)
    assert packed(context) == packed(contextlib.nullcontext()) > 0
    assert not context.report.backwards


def test_a_tangent_is_not_lost() -> None:
    def program() -> list[Tensor]:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            (grad,) = torch.autograd.grad((dual.exp() * dual.sin()).sum(), dual)
            primal, tangent = torch.autograd.forward_ad.unpack_dual(grad)
            return [primal.detach(), tangent.detach()]

    (x,) = leaves((3,))
    assert interpreted(agree(program)) == ["forward-mode AD: an argument has a tangent"]


def test_batched_cotangents_are_interpreted_for_once() -> None:
    def program() -> list[Tensor]:
        (grad,) = torch.autograd.grad((x.exp() * x.sum()).sum(), x, create_graph=True)
        eye = torch.eye(3, dtype=x.dtype)
        rows = torch.autograd.grad(grad, x, eye, is_grads_batched=True, retain_graph=True)
        return [*rows, *torch.autograd.grad(grad.sum(), x)]

    (x,) = leaves((3,))
    with pytest.warns(retrograd.FallbackWarning, match="functorch"):
        context = agree(program, strict=False)
    assert is_compiled_at_the_end(context)


def test_gradients_are_changed_in_place() -> None:
    def program() -> list[Tensor]:
        gx, gy = torch.autograd.grad((x.exp() * y.sin()).sum(), (x, y), create_graph=True)
        gx.mul_(2)
        gy[0] = gx[1] * 3
        return [gx, gy, *torch.autograd.grad((gx * gx + gy).sum(), (x, y))]

    x, y = leaves((3,), (3,))
    agree(program)


def test_hooks_of_the_second_backward_come_in_eagers_order() -> None:
    def events(context: contextlib.AbstractContextManager[object]) -> list[str]:
        seen: list[str] = []
        params = leaves((3, 3), (3, 3), (3, 3))
        independent = leaves((3,), (3,))
        for i, param in enumerate([*params, *independent]):
            param.register_post_accumulate_grad_hook(lambda _, i=i: seen.append(f"accumulated {i}"))
        h = torch.ones(2, 3, dtype=torch.float64)
        for param in params:
            h = (h @ param).tanh()
        loss = h.pow(2).sum() + sum(t.pow(3).sum() for t in independent)
        with context:
            grads = torch.autograd.grad(loss, [*params, *independent], create_graph=True)
            for i, grad in enumerate(grads):
                grad.register_hook(lambda _, i=i: seen.append(f"gradient {i}"))
            sum(grad.pow(2).sum() for grad in grads).backward()
        return seen

    expected = events(contextlib.nullcontext())
    assert len(expected) == 10
    assert events(retrograd.compiled_autograd("aten", strict=True)) == expected


def test_sizes_settle_in_grad_mode() -> None:
    def step(rows: int) -> list[Tensor]:
        x = torch.ones(rows, 3, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
        return list(torch.autograd.grad(grad.pow(2).sum(), (x, w)))

    (w,) = leaves((3, 2))
    context = retrograd.compiled_autograd("aten", strict=True)
    counts = []
    for rows in (4, 5, 6, 7, 9):
        expected = step(rows)
        with context:
            torch.testing.assert_close(step(rows), expected)
        counts.append(retrograd.counters["lowerings"])
    assert counts[1:] == [counts[1]] * 4


def test_tensors_that_no_derivative_reads_are_let_go() -> None:
    import weakref

    (x,) = leaves((3,))
    factor = torch.randn(3, dtype=torch.float64)
    gone = weakref.ref(factor)
    loss = (x.exp() * x * factor).sum()
    with retrograd.compiled_autograd("aten", strict=True):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        del loss, factor
        assert gone() is None
        grad.sum().backward()


@pytest.mark.parametrize(("for_speed", "plans"), [(False, 6), (True, 1)], ids=["eager's bits", "speed"])
def test_orders_of_sums_that_change_from_step_to_step(
    for_speed: bool, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where several threads number the nodes that they make: on a GPU, those of a first derivative are
    made by the engine's thread."""
    monkeypatch.setattr(AtenBackend, "for_speed", for_speed)
    torch.manual_seed(0)
    w = torch.randn(64, requires_grad=True)

    def grad(order: tuple[int, ...], context: contextlib.AbstractContextManager[object]) -> Tensor:
        middle = w * 2
        parts = [middle.sin(), middle.cos(), middle.exp()]
        numbers = [part.grad_fn._sequence_nr() for part in parts]  # type: ignore[union-attr]
        for part, place in zip(parts, order, strict=True):
            part.grad_fn._set_sequence_nr(numbers[place])  # type: ignore[union-attr]
        w.grad = None
        loss = (parts[0] + parts[1] + parts[2]).sum()
        with context:
            loss.backward()
        assert w.grad is not None
        return w.grad

    compiled = retrograd.compiled_autograd(backend="aten")
    orders = [*itertools.permutations(range(3))]
    expected = [grad(order, contextlib.nullcontext()) for order in orders]
    assert not all(torch.equal(one, expected[0]) for one in expected)
    found = [grad(order, compiled) for order in orders * 2]
    for one, other in zip(found, expected * 2, strict=True):
        torch.testing.assert_close(one, other)
        assert for_speed or torch.equal(one, other)
    assert retrograd.counters["plans"] == plans
    assert not compiled.explain().fallbacks
