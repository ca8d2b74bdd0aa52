"""What a capture puts back after the run of a function, or cannot make real, is done again by eager.

Each program runs twice in eager and twice staged; whether it looks at elements first decides where the trace
ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from retrograd import aot


class Scale(nn.Module):
    """Changes itself, as `act` says."""

    def __init__(self, act: Callable[[Any, torch.Tensor], Any], looks: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.names = {"first"}
        self.weight = nn.Parameter(torch.ones(2))
        self.act, self.looks = act, looks

    def forward(self, x: torch.Tensor, into: list[Any]) -> Any:
        scale = float(x.sum()) if self.looks else 2.0
        self.act(self, x)
        into.append(1)
        return (x * self.weight * scale + self.count).sum()


def assigns_a_buffer(module: Scale, x: torch.Tensor) -> None:
    module.count = module.count + 1


def assigns_a_parameter(module: Scale, x: torch.Tensor) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 2)


def registers(module: Scale, x: torch.Tensor) -> None:
    if not hasattr(module, "table"):
        module.register_buffer("table", torch.ones(2), persistent=False)


def fills_a_set(module: Scale, x: torch.Tensor) -> None:
    module.names.add(f"name {len(module.names)}")


def switches_grad_mode(module: Scale, x: torch.Tensor) -> None:
    torch.set_grad_enabled(False)


class Holder:
    """Holds a tensor where no pytree looks."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def hides_a_tensor(module: Scale, x: torch.Tensor) -> None:
    module.holder = Holder(x.detach() + len(module.names))
    module.count = module.holder.value.sum()


def raises(module: Scale, x: torch.Tensor) -> None:
    module.count = module.count + 1
    raise LookupError


ACTS = (
    assigns_a_buffer, assigns_a_parameter, registers, fills_a_set, switches_grad_mode, hides_a_tensor, raises,
)  # fmt: skip


#: the module itself is staged, or a function that knows it from its closure.
WAYS: dict[str, Callable[[Scale], Callable[..., Any]]] = {
    "eager": lambda module: module,
    "module": lambda module: aot.module(module, backend="eager"),
    "closure": lambda module: aot.function(lambda x, into: module(x, into), backend="eager"),
}


def observed(act: Callable[..., Any], looks: bool, way: str) -> list[Any]:
    module, into, seen = Scale(act, looks), list[Any](), list[Any]()
    run = WAYS[way](module)
    for _ in range(2):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        try:
            out = run(x, into)
            seen.append(out.item())
            if out.requires_grad:
                out.backward()
        except LookupError:
            seen.append("raised")
        seen += [torch.is_grad_enabled(), len(into), sorted(module.names), module.count.item()]
        seen += [sorted(module.state_dict()), sorted(name for name, _ in module.named_buffers())]
        seen += [None if x.grad is None else x.grad.tolist(), module.weight.tolist()]
        seen.append(module.holder.value.tolist() if hasattr(module, "holder") else None)
        torch.set_grad_enabled(True)
    return seen


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("way", ["module", "closure"])
@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_state_is_as_eager_leaves_it(act: Callable[..., Any], looks: bool, way: str) -> None:
    assert observed(act, looks, way) == observed(act, looks, "eager")


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_function_that_is_returned_holds_real_tensors(looks: bool) -> None:
    def make(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        y = x.sin()
        scale = float(y.sum()) if looks else 2.0
        return lambda: y * scale

    x = torch.ones(2, requires_grad=True)
    aot.function(make, backend="eager")(x)().sum().backward()
    grad, x.grad = x.grad, None
    make(x)().sum().backward()
    assert torch.equal(grad, x.grad)
