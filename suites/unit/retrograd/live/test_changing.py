"""Sizes, numbers and structures that change from step to step: compilations settle, memory is bounded."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import retrograd
from retrograd.engine import collection as collect
from retrograd.live.captured import CapturedBackward
from retrograd.process import Recent

Step = Callable[[Tensor, Tensor, float], Tensor]


def gradient(root: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    root(w).backward()
    assert w.grad is not None
    return w.grad


def lowerings(
    root: Callable[[Tensor, float], Tensor], values: tuple[float, ...], **settings: object
) -> list[int]:
    """Lowerings so far after each value; each gradient is eager's."""
    context = retrograd.compiled_autograd("aten", **settings)  # type: ignore[arg-type]
    counts = []
    for value in values:
        expected = gradient(lambda w, value=value: root(w, value))
        with context:
            torch.testing.assert_close(gradient(lambda w, value=value: root(w, value)), expected)
        counts.append(retrograd.counters["lowerings"])
    return counts


VALUES = (0.1, 0.2, 0.3, 0.45, 0.5, 1.0, 0.0, 2.0)


@pytest.mark.parametrize(
    "root",
    [
        lambda w, s: (w @ w).sin().sum() * s,
        lambda w, s: ((w @ w) * s).sin().sum() + s,
        lambda w, s: ((w @ w) / (s + 1)).sin().sum(),
        lambda w, s: torch.where(w > 0, w, s).sin().sum(),
        lambda w, s: (w @ w).sin().sum() * torch.tensor(s),
    ],
)
def test_a_loss_scale_neither_captures_nor_compiles(root: Callable[[Tensor, float], Tensor]) -> None:
    assert lowerings(root, VALUES) == [1] * len(VALUES)
    assert retrograd.counters["captures"] == 1


@pytest.mark.parametrize(
    "root",
    [
        lambda w, s: (w @ w).abs().pow(s).sum(),
        lambda w, s: torch.add(w @ w, w, alpha=s).sin().sum(),
        lambda w, s: torch.addmm(w, w, w, alpha=s, beta=s).sin().sum(),
        lambda w, s: functional.leaky_relu(w @ w, s).sin().sum(),
        lambda w, s: (w @ w).clamp(-s, s).sin().sum(),
        lambda w, s: functional.scaled_dot_product_attention(w[None], w[None], w[None], scale=s).sum(),
        lambda w, s: functional.cross_entropy(w @ w, torch.tensor([0, 1, 2]), label_smoothing=min(s, 1.0)),
    ],
)
def test_a_number_in_the_engines_key_compiles_at_most_twice(root: Callable[[Tensor, float], Tensor]) -> None:
    counts = lowerings(root, (0.1, 0.2, 0.3, 0.45, 0.5, 0.6))
    assert retrograd.counters["captures"] == 6
    assert counts[1:] == [counts[1]] * 5


def test_the_call_with_the_changing_number_says_so() -> None:
    context = retrograd.compiled_autograd("aten")
    for value in (2.5, 3.5, 4.5):
        with context:
            gradient(lambda w, value=value: (w @ w).abs().pow(value).sum())
    *_, last = context.explain().backwards
    assert last.opaque_calls == {"PowBackward0 had 2.5, now 3.5": 1}
    assert len(last.schedule.segments) == 2
    assert {low.because for low in last.lowerings} == {"shared with an earlier backward's equal segment"}


def test_one_over_the_number_of_rows_settles() -> None:
    """The factor of a mean changes with the batch."""

    def root(w: Tensor, rows: float) -> Tensor:
        return (torch.ones(int(rows), 3, dtype=torch.float64) @ w).sin().mean()

    counts = lowerings(root, (4, 5, 6, 7, 9, 12))
    assert counts[1:] == [counts[1]] * 5
    assert counts[1] <= 2


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("batches", "most"), [((2, 4, 5), 3), ((2, 3, 4), 4)])
def test_two_sizes_that_change_settle(dynamic: bool | None, batches: tuple[int, ...], most: int) -> None:
    """A batch of three meets the three columns of the weight: it takes one compilation to tell them apart."""

    def root(w: Tensor, size: float) -> Tensor:
        batch, length = divmod(int(size), 100)
        x = torch.ones(batch, length, 3, dtype=torch.float64) @ w
        return (x.softmax(1) @ x.transpose(1, 2)).sin().sum()

    first, second, third = (100 * batch for batch in batches)
    sizes = (first + 4, first + 5, second + 5, second + 7, third + 9, third + 11, second + 7)
    counts = lowerings(root, sizes, dynamic=dynamic)
    assert counts[4:] == [most] * 3


@pytest.mark.parametrize("first", [0, 1, 4])
def test_sizes_zero_and_one_are_right_wherever_they_come(first: int) -> None:
    def root(w: Tensor, rows: float) -> Tensor:
        x = torch.ones(int(rows), 3, dtype=torch.float64) @ w
        return (x.exp() * x.sum(1, keepdim=True)).sum()

    counts = lowerings(root, (first, 5, 1, 0, 6, 7, 0, 1, 9))
    assert counts[-1] == counts[4] <= 6


def test_views_written_in_place_at_changing_sizes() -> None:
    def root(w: Tensor, rows: float) -> Tensor:
        x = (torch.ones(int(rows), 3, dtype=torch.float64) @ w).clone()
        x[1:, 0].mul_(w[0, 0])
        return (x * x).sum()

    counts = lowerings(root, (4, 5, 6, 7, 9, 12))
    assert counts[2:] == [counts[2]] * 4


def test_expanded_operands_at_changing_sizes() -> None:
    def root(w: Tensor, rows: float) -> Tensor:
        wide = w.sum(0).expand(int(rows), 3)
        return (wide * torch.arange(int(rows), dtype=torch.float64)[:, None]).sin().sum()

    counts = lowerings(root, (4, 5, 6, 7, 9, 12))
    assert counts[2:] == [counts[2]] * 4


def test_a_vocabulary_that_grows() -> None:
    def root(w: Tensor, words: float) -> Tensor:
        table = torch.cat([w, torch.ones(int(words), 3, dtype=torch.float64)])
        return functional.embedding(torch.tensor([0, 2, 2]), table).sin().sum()

    counts = lowerings(root, (4, 5, 6, 7, 9, 12))
    assert counts[2:] == [counts[2]] * 4


def chain(w: Tensor, length: int) -> Tensor:
    for bit in format(length, "b"):
        w = w.sin() if bit == "1" else w.tanh()
    return w.sum()


def test_structures_that_never_repeat_are_compiled_no_more() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    with context:
        for length in range(1, 25):
            gradient(lambda w, length=length: chain(w, length))
    assert retrograd.counters["captures"] == 24
    assert retrograd.counters["lowerings"] == 12
    (last,) = context.explain().backwards[-1].lowerings
    assert last.how == "interpreted"
    assert last.because.startswith("of the last backwards, 12 or more had a new structure: call ")
    assert ", now " in last.because


def test_a_structure_that_comes_again_is_compiled_after_all() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    with context:
        for length in range(1, 20):
            gradient(lambda w, length=length: chain(w, length))
        gradient(lambda w: chain(w, 19))
    assert retrograd.counters["lowerings"] == 13
    assert [low.how for low in context.explain().backwards[-1].lowerings] == ["interpreted", "aten"]


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_program_that_never_repeats_is_left_to_the_engine_after_a_dozen_backwards() -> None:
    context = retrograd.compiled_autograd("eager")
    for length in range(1, 101):
        expected = gradient(lambda w, length=length: chain(w, length))
        with context:
            assert torch.equal(gradient(lambda w, length=length: chain(w, length)), expected)
    assert retrograd.counters["captures"] <= 13
    (reason,) = context.explain().fallbacks
    assert reason.code == "nothing-repeats"
    assert ", now " in reason.text


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_structures_that_come_back_are_captured_again() -> None:
    context = retrograd.compiled_autograd("eager")
    with context:
        for length in range(1, 40):
            gradient(lambda w, length=length: chain(w, length))
        fallbacks = retrograd.counters["fallbacks"]
        for _ in range(40):
            gradient(lambda w: chain(w, 1000))
    assert retrograd.counters["fallbacks"] - fallbacks < 40
    assert context.explain().backwards[-1].runs > 1


def test_some_new_structures_among_many_known_ones_are_captured() -> None:
    with retrograd.compiled_autograd("eager", strict=False):
        for step in range(200):
            gradient(lambda w, step=step: chain(w, step if step % 20 == 0 else 1))
    assert retrograd.counters["fallbacks"] == 0


def test_reset_frees_every_captured_structure() -> None:
    with retrograd.compiled_autograd("aten", strict=True):
        for length in range(1, 20):
            gradient(lambda w, length=length: chain(w, length))
    assert alive() == 19
    retrograd.reset()
    assert alive() == 0


def alive() -> int:
    gc.collect()
    return sum(type(one) is CapturedBackward for one in gc.get_objects())


def test_the_engine_does_not_remember_structures_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "KEPT_STRUCTURES", 8)
    with retrograd.compiled_autograd("eager", strict=True):
        for _ in range(2):
            gradient(lambda w: chain(w, 1))
        for length in range(2, 12):
            gradient(lambda w, length=length: chain(w, length))
        gradient(lambda w: chain(w, 1))
    assert retrograd.counters["captures"] == 12


def test_what_captures_share_is_bounded() -> None:
    recent = Recent[int](2)
    made = [recent.get(key, lambda key=key: key) for key in (1, 2, 1, 3, 2)]
    assert made == [(1, True), (2, True), (1, False), (3, True), (2, True)]
    assert len(recent) == 2


def test_equal_segments_of_other_settings_are_not_shared() -> None:
    for limit in (3, 4):
        with retrograd.compiled_autograd("aten", strict=True, recompile_limit=limit):
            gradient(lambda w: w.sin().sum())
    assert retrograd.counters["lowerings"] == 2


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("as_input", [False, True])
def test_a_leaf_may_ask_for_another_dtype_after_the_capture(
    as_input: bool, hooked: bool, backend: str
) -> None:
    """With regions of one node too, which are found by what each gradient was made by."""

    def steps() -> list[Tensor | None]:
        torch.manual_seed(0)
        w = torch.randn(4, requires_grad=True)
        seen: list[Tensor | None] = []
        if hooked:
            w.register_hook(lambda grad: seen.append(grad.clone()))
        for step in range(4):
            if step == 2:
                w.grad, w.grad_dtype = None, torch.float64
            loss = (w.sin() + w.exp() * w.cos()).sum()
            if as_input:
                seen += torch.autograd.grad(loss, w)
            else:
                loss.backward()
                seen.append(None if w.grad is None else w.grad.clone())
        return seen

    expected = steps()
    with retrograd.compiled_autograd(backend, regions=1):
        found = steps()
    assert [grad.dtype for grad in found] == [grad.dtype for grad in expected]
    assert all(map(torch.equal, found, expected))
