"""Global state around a backward: anomaly mode, autocast, dispatch modes, threads, wrong devices.

In: a probe. Out: gradients under these modes, and eager's exception types.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("modes", "errors"), issue="pytorch#149897")
def anomaly_mode_finds_nan(p: Probe) -> None:
    """Under anomaly detection a NaN in a backward is a RuntimeError, at the node that made it."""
    x = p.leaf("x", p.tensor([1.0, -1.0], requires_grad=True))
    y = x.sqrt()
    y.register_hook(p.hook("y"))
    with torch.autograd.set_detect_anomaly(True), p.backward():
        (y * 0.0).nansum().backward()


@scenario(tags=("modes",), issue="pytorch#149897")
def anomaly_mode_without_nan(p: Probe) -> None:
    """Under anomaly detection a sound backward gives the usual gradients and hook calls."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with torch.autograd.set_detect_anomaly(True):
        y = x.sin()
        y.register_hook(p.hook("y"))
        with p.backward():
            y.exp().sum().backward()


@scenario(tags=("modes",), issue="pytorch#149897")
def anomaly_mode_without_nan_check(p: Probe) -> None:
    """With `check_nan=False` a NaN passes through to `.grad`."""
    x = p.leaf("x", p.tensor([1.0, -1.0], requires_grad=True))
    with torch.autograd.set_detect_anomaly(True, check_nan=False), p.backward():
        (x.sqrt() * 0.0).nansum().backward()


@scenario(tags=("modes", "autocast"))
def autocast_around_forward(p: Probe) -> None:
    """Under autocast hooks inside see bfloat16 gradients, parameters get float32 ones."""
    model = p.module(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    with torch.autocast(p.device.type, dtype=torch.bfloat16):
        hidden = model[0](x)
        out = model[2](model[1](hidden))
    hidden.register_hook(p.hook("hidden"))
    with p.backward():
        out.float().pow(2).sum().backward()


@scenario(tags=("modes", "autocast"), issue="pytorch#143755", fp64=False)
def autocast_around_backward(p: Probe) -> None:
    """Autocast that is active around backward applies to the matrix products of the backward."""
    layer = p.compile(p.module(nn.Linear(8, 8)))
    x = p.leaf("x", p.randn(4, 8, requires_grad=True))
    loss = layer(x).pow(2).sum()
    with torch.autocast(p.device.type, dtype=torch.bfloat16), p.backward():
        loss.backward()


@scenario(tags=("modes", "autocast"), issue="pytorch#179804")
def autocast_off_for_an_inner_part(p: Probe) -> None:
    """A part under `autocast(enabled=False)` is differentiated in float32."""
    layer = p.module(nn.Linear(4, 4))
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    watch = p.hook("inner")

    def run(h: Tensor) -> Tensor:
        with torch.autocast(p.device.type, dtype=torch.bfloat16):
            outer = layer(h)
            with torch.autocast(p.device.type, enabled=False):
                inner = outer.to(layer.weight.dtype) @ layer.weight.t()
        return inner

    out = p.compile(run)(x)
    out.register_hook(watch)
    with p.backward():
        out.pow(2).sum().backward()


class CountCalls(TorchDispatchMode):
    """Let every operation pass, and count them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@scenario(tags=("modes",))
def dispatch_mode_around_backward(p: Probe) -> None:
    """A dispatch mode that is active around backward sees its operations and does not disturb it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("y"))
    loss = y.exp().sum()
    mode = CountCalls()
    with mode, p.backward():
        loss.backward()
    p.event("saw_operations", mode.calls > 0)


class PassThrough(TorchFunctionMode):
    """Let every torch function pass."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@scenario(tags=("modes",))
def function_mode_around_backward(p: Probe) -> None:
    """A torch-function mode that is active around the whole step does not disturb it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with PassThrough(), p.backward():
        y = x.sin()
        y.register_hook(p.hook("y", lambda g: g * 2))
        y.exp().sum().backward()


def _train(p: Probe, model: nn.Module, x: Tensor, losses: list[Tensor]) -> None:
    """Take three steps of gradient descent and append each loss."""
    for _ in range(3):
        loss = model(x).pow(2).mean()
        model.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.1)


def _train_in_threads(p: Probe, count: int, own_context: bool) -> None:
    """Train one model per thread, all at once; a failed thread's exception is raised again here."""
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(count)]
    models = [p.module(net, f"m{i}") for i, net in enumerate(nets)]
    inputs = [p.randn(5, 3) for _ in range(count)]
    losses: list[list[Tensor]] = [[] for _ in range(count)]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            if own_context:
                with p.backward():
                    _train(p, models[i], inputs[i], losses[i])
            else:
                _train(p, models[i], inputs[i], losses[i])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(count):
        p.value(f"losses{i}", tuple(losses[i]))
    if failures:
        raise failures[0]


@scenario(tags=("threads",), issue="pytorch#134530")
def two_threads_training(p: Probe) -> None:
    """Two threads train two models in one process, each in a context of its own."""
    _train_in_threads(p, 2, own_context=True)


@scenario(tags=("threads",), issue="pytorch#134530")
def four_threads_in_one_context(p: Probe) -> None:
    """Four threads run their backwards inside one context that the main thread has opened."""
    with p.backward():
        _train_in_threads(p, 4, own_context=False)


@scenario(tags=("device", "hooks", "errors"))
def hook_returns_a_tensor_on_another_device(p: Probe) -> None:
    """A hook that moves its gradient to another device is refused with a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("y", lambda g: g.to("meta")))
    with p.backward():
        y.exp().sum().backward()


class ReturnsMeta(torch.autograd.Function):
    """Identity whose backward puts its gradient on the meta device."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to("meta")


@scenario(tags=("device", "function", "errors"))
def function_returns_a_tensor_on_another_device(p: Probe) -> None:
    """A Function's gradient on another device than its input is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        ReturnsMeta.apply(x.sin()).sum().backward()
