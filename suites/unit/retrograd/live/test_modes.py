"""Modes of thread and process: determinism, inference mode, anomaly mode, and what hooks leave on."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import retrograd
from unit.retrograd.programs import leaf

BACKENDS = ["eager", "aten", "inductor"]


@contextlib.contextmanager
def deterministic(on: bool = True, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def nondeterministic_root() -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf, and a root whose backward has an operation without a deterministic form."""
    torch.manual_seed(0)
    x, source = torch.randn(6, requires_grad=True), torch.randn(2)
    return x, x.sin().put(torch.tensor([1, 4]), source).exp().sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operation_without_a_deterministic_form_raises_eagers_error_each_time(backend: str) -> None:
    def message(context: contextlib.AbstractContextManager[object]) -> str:
        x, root = nondeterministic_root()
        with pytest.raises(RuntimeError) as error, deterministic(), context:
            root.backward()
        assert x.grad is None
        return f"{type(error.value)}: {error.value}"

    eager = message(contextlib.nullcontext())
    assert "does not have a deterministic implementation" in eager
    context = retrograd.compiled_autograd(backend)
    assert [message(context) for _ in range(3)] == [eager] * 3


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_with_warn_only_it_warns_each_time_and_runs(backend: str) -> None:
    def warned(context: contextlib.AbstractContextManager[object]) -> tuple[list[str], torch.Tensor]:
        x, root = nondeterministic_root()
        torch.set_warn_always(True)
        with warnings.catch_warnings(record=True) as caught, deterministic(warn_only=True), context:
            warnings.simplefilter("always")
            root.backward()
        torch.set_warn_always(False)
        assert torch.is_deterministic_algorithms_warn_only_enabled() is False
        return [str(item.message) for item in caught if "deterministic" in str(item.message)], x.grad

    eager, expected = warned(contextlib.nullcontext())
    assert eager
    context = retrograd.compiled_autograd(backend)
    for _ in range(3):
        messages, grad = warned(context)
        assert messages == eager
        torch.testing.assert_close(grad, expected)


def test_determinism_is_asked_for_once_and_the_code_is_used_afterwards() -> None:
    w = leaf()
    with retrograd.compiled_autograd("aten") as context, deterministic():
        for _ in range(3):
            w.grad = None
            w.sin().sum().backward()
            assert torch.equal(w.grad, w.detach().cos())
    with retrograd.compiled_autograd("aten", strict=True):
        w.sin().sum().backward()
    reports = [low for backward in retrograd.explain().backwards for low in backward.lowerings]
    assert [low.how for low in reports] == ["aten", "aten"]
    assert context.explain().backwards[0].runs == 3


def test_a_switch_of_determinism_is_a_recompile_that_says_so() -> None:
    w = leaf()
    with retrograd.compiled_autograd("aten") as context:
        for on in (False, True, False, True):
            w.grad = None
            with deterministic(on):
                w.sin().sum().backward()
    (recompile,) = context.explain().recompiles
    assert recompile.because == "deterministic algorithms was off, now on"


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_a_cotangent_made_in_inference_mode_is_taken(backend: str) -> None:
    with torch.inference_mode():
        cotangent = torch.arange(12.0).view(4, 3)
    with retrograd.compiled_autograd(backend, strict=True):
        for cot in (cotangent, cotangent.clone(), cotangent):
            w = leaf()
            (w.sin() * 2).backward(cot)
            torch.testing.assert_close(w.grad, w.detach().cos() * 2 * cot)


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_backward_inside_inference_mode_runs_as_eager_runs_it() -> None:
    def gradient(context: contextlib.AbstractContextManager[object]) -> tuple[bool, torch.Tensor]:
        w = leaf()
        root = w.sin().sum()
        with context, torch.inference_mode():
            root.backward()
        return w.grad.is_inference(), w.grad

    eager, ours = gradient(contextlib.nullcontext()), gradient(retrograd.compiled_autograd("eager"))
    assert eager[0] == ours[0]
    assert torch.equal(eager[1], ours[1])


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
@pytest.mark.parametrize("check_nan", [True, False])
@pytest.mark.parametrize("how", ["set_detect_anomaly", "detect_anomaly"])
def test_anomaly_mode_says_what_eager_says(how: str, check_nan: bool) -> None:
    def said(context: contextlib.AbstractContextManager[object]) -> list[str]:
        x = torch.tensor([1.0, -1.0], requires_grad=True)
        texts: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            anomaly = (
                torch.autograd.detect_anomaly(check_nan)
                if how == "detect_anomaly"
                else torch.autograd.set_detect_anomaly(True, check_nan)
            )
            with context, anomaly:
                y = x.sqrt()
                try:
                    (y * 0.0).nansum().backward()
                except RuntimeError as error:
                    texts.append(str(error))
        texts += [str(item.message) for item in caught if item.category is not retrograd.FallbackWarning]
        # The frames above this function differ: one is called with another context than the other.
        return [re.sub(r"(?s)  File .*?, in said\n", "", text) for text in texts]

    eager = said(contextlib.nullcontext())
    assert any("y = x.sqrt()" in text for text in eager) == check_nan
    assert said(retrograd.compiled_autograd("eager")) == eager


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_grad_mode_that_a_hook_leaves_on_ends_with_its_node(backend: str) -> None:
    def seen(context: contextlib.AbstractContextManager[object]) -> list[object]:
        events: list[object] = []
        w = leaf()
        y = w.sin()
        z = y.exp()

        def leave_on(grad: torch.Tensor) -> None:
            torch.set_grad_enabled(True)

        z.register_hook(leave_on)
        z.grad_fn.register_prehook(lambda grads: events.append(torch.is_grad_enabled()))
        z.grad_fn.register_hook(
            lambda ins, outs: events.append((torch.is_grad_enabled(), ins[0].requires_grad))
        )
        y.register_hook(lambda grad: events.append((torch.is_grad_enabled(), grad.requires_grad)))
        w.register_hook(leave_on)
        with context:
            z.sum().backward()
        return [*events, w.grad.requires_grad, torch.is_grad_enabled()]

    eager = seen(contextlib.nullcontext())
    assert eager[:3] == [True, (True, True), (False, True)]
    assert seen(retrograd.compiled_autograd(backend)) == eager


class _Seeing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_function_mode_sees_of_a_registration_what_it_sees_in_eager(register: str) -> None:
    with retrograd.compiled_autograd(backend="eager"):
        pass  # from now on, registrations are observed
    replaced = getattr(Tensor, register)
    x = torch.ones(2, requires_grad=True)
    seen = []
    for call in (replaced.__wrapped__, replaced):
        with _Seeing() as mode:
            call(x, lambda grad: None)
        seen.append(mode.seen)
    assert seen[0] == seen[1]


def test_a_function_mode_sees_of_retain_grad_in_a_hook_what_it_sees_in_eager() -> None:
    def seen() -> list[Any]:
        mode, y = _Seeing(), torch.ones(2, requires_grad=True).sin()
        z = y.cos()

        def hook(grad: Tensor) -> None:
            with mode:
                y.retain_grad()

        z.register_hook(hook)
        z.sum().backward()
        assert y.grad is not None
        return mode.seen

    with retrograd.compiled_autograd(backend="eager"):
        found = seen()
    assert found == seen() == ["retain_grad"]
