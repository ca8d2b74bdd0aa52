"""retrograd as installed from its wheel: every way in trains one step, with both backends, as eager does."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
from collections.abc import Callable

import torch

import retrograd
from retrograd import aot

assert "site-packages" in retrograd.__file__, retrograd.__file__
assert retrograd.__version__ == importlib.metadata.version("retrograd")
assert importlib.resources.files("retrograd").joinpath("py.typed").is_file()
assert "retrograd" in torch._dynamo.list_backends()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
x = torch.randn(16, 4)


def gradients(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    call(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def is_near(found: list[torch.Tensor], backend: str) -> bool:
    return all(
        torch.equal(a, b) if backend == "eager" else torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(found, eager, strict=True)
    )


eager = gradients(model)
for backend in ("eager", "inductor"):
    with retrograd.compiled_autograd(backend=backend, strict=True) as context:
        assert is_near(gradients(model), backend)
    assert context.explain().backwards, backend
    strict = {"backend": backend, "strict": True}
    assert is_near(gradients(torch.compile(model, backend="retrograd", options=strict)), backend)
    assert is_near(gradients(aot.module(model, **strict)), backend)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@retrograd.compile_step(backend="eager")
def step() -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


losses = [step() for _ in range(4)]
assert losses == sorted(losses, reverse=True), losses
assert step.explain().compiled == 3, step.explain()
