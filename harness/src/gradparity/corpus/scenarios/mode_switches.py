"""Modes that are switched around and inside a backward: anomaly, autocast, inference, determinism, profiler.

In: a probe. Out: gradients, and what hooks find when other hooks have switched a mode and left it so.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@contextmanager
def _determinism(mode: bool, warn_only: bool = False) -> Iterator[None]:
    """Deterministic algorithms on or off, and as before afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    before_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=before_warns)


def _modes(p: Probe) -> tuple[Any, ...]:
    """What a hook can see of the thread's modes."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(p.device.type),
        torch.is_inference_mode_enabled(),
    )


# anomaly mode


@scenario(tags=("modes",), issue="pytorch#149897")
def anomaly_mode_shows_the_forward_line(p: Probe) -> None:
    """The error names the node, and a warning before it shows where the forward made that node."""
    x = p.leaf("x", p.tensor([1.0, -1.0], requires_grad=True))
    with torch.autograd.detect_anomaly(), p.backward():
        y = x.sqrt()
        y.register_hook(p.hook("y"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                (y * 0.0).nansum().backward()
            except RuntimeError as error:
                p.event("raised", str(error))
        shown = [str(item.message) for item in caught if "Error detected in" in str(item.message)]
    p.event("forward_line", any(re.search(r"y = x\.sqrt\(\)", text) for text in shown))
    p.event("names_the_node", any("SqrtBackward0" in text for text in shown))


@scenario(tags=("modes",))
def anomaly_mode_switched_on_between_steps(p: Probe) -> None:
    """A step in anomaly mode between two without it gives the same gradients and hook calls."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        for on in (False, True, False):
            with torch.autograd.set_detect_anomaly(on, check_nan=False):
                y = x.sin()
                y.register_hook(p.hook("y"))
                y.exp().sum().backward()


@scenario(tags=("modes", "hooks"))
def anomaly_mode_switched_on_in_a_hook(p: Probe) -> None:
    """A hook may switch anomaly mode on and off for a forward of its own."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def look(grad: Tensor) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return grad.exp()

    y.register_hook(p.hook("y", look))
    with p.backward():
        y.exp().sum().backward()
    p.event("anomaly", torch.is_anomaly_enabled())


# autocast and grad mode


@scenario(tags=("modes", "autocast"), fp64=False)
def autocast_inside_a_hook(p: Probe) -> None:
    """Autocast that a hook enters and leaves applies to the hook's own products only."""
    layer = p.module(nn.Linear(4, 4))
    weight = p.randn(4, 4)
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    y = layer(x)

    def product(grad: Tensor) -> Tensor:
        with torch.autocast(p.device.type, dtype=torch.bfloat16):
            made = grad @ weight
            p.event("inside", made)
        return made.to(grad.dtype)

    y.register_hook(p.hook("y", product))
    with p.backward():
        y.sin().sum().backward()


@scenario(tags=("modes", "autocast"), fp64=False)
def autocast_around_backward_and_off_in_a_hook(p: Probe) -> None:
    """A hook that switches autocast off for itself leaves it on for the rest of the backward."""
    layer = p.module(nn.Linear(4, 4))
    weight = p.randn(4, 4)
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    y = layer(x)

    def product(grad: Tensor) -> Tensor:
        with torch.autocast(p.device.type, enabled=False):
            p.event("off", grad @ weight)
        p.event("on", grad @ weight)
        return grad

    y.register_hook(p.hook("y", product))
    loss = y.sin().sum()
    with torch.autocast(p.device.type, dtype=torch.bfloat16), p.backward():
        loss.backward()


@scenario(tags=("modes", "autocast"), fp64=False)
def autocast_on_and_off_between_steps(p: Probe) -> None:
    """Autocast around every other backward applies to that backward only."""
    layer = p.module(nn.Linear(4, 4))
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    with p.backward():
        for on in (True, False, True, False):
            loss = layer(x).sin().sum()
            with torch.autocast(p.device.type, dtype=torch.bfloat16, enabled=on):
                loss.backward()
            p.value(f"weight_{len(p.events)}", layer.weight.grad)
            p.event("step", on)


class SwitchesModes(torch.autograd.Function):
    """Identity whose backward leaves grad mode and autocast switched."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, p: Probe) -> Tensor:
        ctx.p = p
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.p.event("function", _modes(ctx.p))
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled(ctx.p.device.type, True)
        return grad * 2, None


@scenario(tags=("modes", "function"))
def function_leaves_modes_switched(p: Probe) -> None:
    """What a Function's backward leaves switched is not seen by the hooks after it, nor by the caller."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(lambda grad: p.event("before", _modes(p)))
    z = SwitchesModes.apply(y, p)
    with p.backward():
        z.exp().sum().backward()
    p.event("after", _modes(p))


@scenario(tags=("modes", "hooks"))
def hook_leaves_grad_mode_on(p: Probe) -> None:
    """Grad mode that a hook leaves on holds for its own node, and is off again at the next one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = y.exp()

    def leave_on(grad: Tensor) -> None:
        p.event("z", _modes(p))
        torch.set_grad_enabled(True)

    z.register_hook(leave_on)
    y.register_hook(lambda grad: p.event("y", *_modes(p), grad.requires_grad))
    x.register_post_accumulate_grad_hook(lambda leaf: p.event("x", *_modes(p)))
    with p.backward():
        z.sum().backward()
    p.event("after", _modes(p))


@scenario(tags=("modes", "hooks", "higher-order"))
def grad_mode_off_in_a_hook_under_create_graph(p: Probe) -> None:
    """With create_graph a hook finds grad mode on; what it computes with it off has no history."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def without_history(grad: Tensor) -> Tensor:
        p.event("grad_mode", torch.is_grad_enabled())
        with torch.no_grad():
            return grad * 2

    y.register_hook(without_history)
    with p.backward():
        (first,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
        first.pow(2).sum().backward()


# inference mode


@scenario(tags=("modes", "inference"))
def inference_tensors_as_inputs(p: Probe) -> None:
    """A tensor made in inference mode may take part where nobody saves it, and be a cotangent."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with torch.inference_mode():
        offset, cotangent = p.randn(3), p.randn(3)
    y = (x + offset).sin()
    y.register_hook(p.hook("y"))
    with p.backward():
        y.backward(cotangent)
        (x * 2).backward(cotangent)


@scenario(tags=("modes", "inference", "errors"))
def inference_tensor_saved_for_backward(p: Probe) -> None:
    """A tensor made in inference mode cannot be saved for a backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with torch.inference_mode():
        factor = p.randn(3)
    with p.backward():
        (x * factor).sum().backward()


@scenario(tags=("modes", "inference"))
def backward_inside_inference_mode(p: Probe) -> None:
    """A graph that was made outside can be differentiated in inference mode, hooks included."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(lambda grad: p.event("y", *_modes(p), grad.is_inference()))
    loss = y.exp().sum()
    with torch.inference_mode(), p.backward():
        loss.backward()
    p.event("inference", x.grad is not None and x.grad.is_inference())


@scenario(tags=("modes", "inference", "hooks"))
def inference_mode_inside_a_hook(p: Probe) -> None:
    """A hook may evaluate in inference mode; what it returns from there is used as the gradient."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def evaluate(grad: Tensor) -> Tensor:
        with torch.inference_mode():
            return grad * 2

    y.register_hook(p.hook("y", evaluate))
    with p.backward():
        y.exp().sum().backward()
    p.event("inference", x.grad is not None and x.grad.is_inference())


@scenario(tags=("modes", "inference", "accumulation"))
def inference_gradient_is_accumulated(p: Probe) -> None:
    """A gradient that a hook made in inference mode is added to the `.grad` that is there."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_hook(torch.inference_mode()(lambda grad: grad * 3))
    with p.backward():
        x.sin().sum().backward()
        x.cos().sum().backward()
    p.event("inference", x.grad is not None and x.grad.is_inference())


# deterministic algorithms


@scenario(tags=("modes", "determinism"))
def determinism_switched_between_steps(p: Probe) -> None:
    """Deterministic algorithms, switched on and off between steps, do not change what is computed."""
    x = p.leaf("x", p.randn(6, 3, requires_grad=True))
    index = p.randint(6, 9)
    with p.backward():
        for on in (False, True, False, True):
            with _determinism(on):
                y = x.index_select(0, index)
                y.register_hook(p.hook("y"))
                y.sin().sum().backward()


@scenario(tags=("modes", "determinism", "errors"))
def determinism_refuses_a_nondeterministic_backward(p: Probe) -> None:
    """An operation of the backward without a deterministic form raises; hooks before it have run."""
    x = p.leaf("x", p.randn(6, requires_grad=True))
    source = p.leaf("source", p.randn(2, requires_grad=True))
    index = torch.tensor([1, 4], device=p.device)
    y = x.sin().put(index, source)
    y.register_hook(p.hook("y"))
    loss = y.exp().sum()
    with _determinism(True), p.backward():
        loss.backward()


@scenario(tags=("modes", "determinism"))
def determinism_that_only_warns(p: Probe) -> None:
    """With `warn_only` the same operation runs, and torch warns."""
    x = p.leaf("x", p.randn(6, requires_grad=True))
    source = p.leaf("source", p.randn(2, requires_grad=True))
    index = torch.tensor([1, 4], device=p.device)
    y = x.sin().put(index, source)
    y.register_hook(p.hook("y"))
    loss = y.exp().sum()
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as caught, _determinism(True, warn_only=True), p.backward():
        warnings.simplefilter("always")
        loss.backward()
    torch.set_warn_always(False)
    p.event("warned", any("deterministic" in str(item.message) for item in caught))


# profiler, stance, disabled hooks


@scenario(tags=("modes", "profiler"))
def profiler_around_backward(p: Probe) -> None:
    """Under a profiler the backward is as without, and the profile names its nodes."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("y"))
    loss = y.exp().sum()
    with torch.autograd.profiler.profile() as profile, p.backward():
        loss.backward()
    names = " ".join(event.name for event in profile.function_events)
    for node in ("ExpBackward0", "SinBackward0", "AccumulateGrad"):
        p.event(node, node in names)


@scenario(tags=("modes", "profiler", "hooks"))
def record_function_inside_a_hook(p: Probe) -> None:
    """A hook may open ranges of its own, with and without a profiler."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def ranged(grad: Tensor) -> Tensor:
        with torch.profiler.record_function("mine"):
            return grad * 2

    with p.backward():
        for profiled in (False, True):
            y = x.sin()
            y.register_hook(p.hook("y", ranged))
            with torch.autograd.profiler.profile(enabled=profiled) as profile:
                y.exp().sum().backward()
            events = profile.function_events if profiled else ()
            p.event("seen", any(event.name == "mine" for event in events))


@scenario(tags=("modes", "hooks"))
def hooks_disabled_for_the_compiler(p: Probe) -> None:
    """`torch.compiler.disable` on hooks of every kind changes nothing for them."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    node = y.grad_fn
    assert node is not None
    y.register_hook(torch.compiler.disable(p.hook("y", lambda grad: grad * 2)))
    node.register_prehook(torch.compiler.disable(p.hook("pre", kind="node_pre")))
    node.register_hook(torch.compiler.disable(p.hook("post", kind="node_post")))
    x.register_post_accumulate_grad_hook(torch.compiler.disable(p.hook("x", kind="post_accumulate")))
    with p.backward():
        y.exp().sum().backward()


@scenario(tags=("modes", "stance"))
def stance_force_eager_for_one_step(p: Probe) -> None:
    """A step under the stance `force_eager` between two others runs as eager runs it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        for stance in ("default", "force_eager", "default"):
            y = x.sin()
            y.register_hook(p.hook("y"))
            loss = y.exp().sum()
            with torch.compiler.set_stance(stance):
                loss.backward()
