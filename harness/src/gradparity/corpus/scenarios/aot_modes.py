"""Modes around and inside functions compiled ahead: autocast, grad modes, determinism, anomaly detection.

In: a probe, whose `compile` is the identity for eager. Out: dtypes, histories and gradients, as written.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.storages import history
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "modes")
BFLOAT16 = torch.bfloat16


@scenario(tags=(*TAGS, "autocast"), fp64=False)
def aot_autocast_around_every_other_call(p: Probe) -> None:
    """Autocast around the second and fourth call of one function applies to these calls only."""
    x, w = (p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in "xw")
    call = p.compile(lambda a, b: a @ b)
    for step in range(4):
        with torch.autocast(p.device.type, dtype=BFLOAT16, enabled=step % 2 == 1):
            out = call(x, w)
        p.event(f"dtype{step}", str(out.dtype))
        with p.backward():
            out.float().square().sum().backward()
        p.value(f"grads{step}", (x.grad, w.grad))


@scenario(tags=(*TAGS, "autocast"), fp64=False)
def aot_autocast_inside(p: Probe) -> None:
    """Autocast that the function enters itself ends inside it, and its backward is of the same dtypes."""
    x, w = (p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in "xw")

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(a.device.type, dtype=BFLOAT16):
            inner = a @ b
        return inner, inner.float() @ b

    inner, out = p.compile(run)(x, w)
    p.event("dtypes", str(inner.dtype), str(out.dtype), torch.is_autocast_enabled(p.device.type))
    with p.backward():
        out.square().sum().backward()


@scenario(tags=(*TAGS, "autocast"), issue="pytorch#179804", fp64=False)
def aot_autocast_off_inside_of_on(p: Probe) -> None:
    """A part that switches autocast off, within a call under autocast, has float32 gradients."""
    x, w = (p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in "xw")

    def run(a: Tensor, b: Tensor) -> Tensor:
        low = a @ b
        with torch.autocast(a.device.type, enabled=False):
            return low.float() @ b

    with torch.autocast(p.device.type, dtype=BFLOAT16):
        out = p.compile(run)(x, w)
    p.event("dtype", str(out.dtype))
    with p.backward():
        out.square().sum().backward()


@scenario(tags=(*TAGS, "autocast"), issue="pytorch#143755", fp64=False)
def aot_autocast_around_the_backward(p: Probe) -> None:
    """Autocast around one of two backwards of a kept graph applies to its matrix products only there."""
    x, w = (p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in "xw")
    out = p.compile(lambda a, b: (a @ b).tanh())(x, w)
    for step in range(2):
        with torch.autocast(p.device.type, dtype=BFLOAT16, enabled=step == 1), p.backward():
            p.value(f"grads{step}", torch.autograd.grad(out.sum(), [x, w], retain_graph=True))


@scenario(tags=(*TAGS, "autocast"), fp64=False)
def aot_autocast_of_a_model_over_steps(p: Probe) -> None:
    """Forward under autocast, backward outside, a step of the optimizer, three times."""
    model = p.module(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)))
    run, optimizer = p.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with torch.autocast(p.device.type, dtype=BFLOAT16):
            loss = run(p.randn(3, 4)).float().square().mean()
        with p.backward():
            optimizer.zero_grad()
            loss.backward()
        p.value(f"loss{step}", loss)
        optimizer.step()


class _FloatInside(nn.Module):
    """A product in float32 between layers that autocast runs in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(nn.functional.gelu(self.first(x)))
        with torch.autocast(x.device.type, enabled=False):
            hidden = hidden.float() @ self.first.weight.float()
            hidden = hidden @ self.first.weight.t()
        return self.last(hidden)


@scenario(tags=(*TAGS, "autocast"), issue="pytorch#177287", fp64=False)
def aot_autocast_around_whole_steps(p: Probe) -> None:
    """Forward and backward under one autocast: products of the backward of a float32 part are in bfloat16."""
    model = p.module(_FloatInside())
    run, optimizer = p.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast(p.device.type, dtype=BFLOAT16):
            loss = run(p.randn(3, 4)).float().square().mean()
            with p.backward():
                loss.backward()
        p.value(f"grads{step}", tuple(one.grad for one in model.parameters()))
        optimizer.step()


@scenario(tags=(*TAGS, "autocast"), fp64=False)
def aot_autocast_around_backwards_of_other_layouts(p: Probe) -> None:
    """Cotangents of three layouts, from a kept graph, each with autocast off, in bfloat16 and in float16."""
    x, w = (p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in "xw")
    out = p.compile(lambda a, b: (a @ b.sin()).tanh() @ b)(x, w)
    cotangents = p.randn(3, 3), p.randn(3, 3).t(), p.randn(3, 1).expand(3, 3)
    for number, cotangent in enumerate(cotangents):
        for dtype in (None, BFLOAT16, torch.float16):
            with torch.autocast(p.device.type, dtype=dtype, enabled=dtype is not None), p.backward():
                grads = torch.autograd.grad(out, [x, w], cotangent, retain_graph=True)
            p.value(f"grads{number} {dtype}", grads)


@scenario(tags=(*TAGS, "no-grad"))
def aot_no_grad_around_every_other_call(p: Probe) -> None:
    """Under no_grad a call gives a result without history; the next call gives one with."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    call = p.compile(lambda a: a.sin() * 2)
    for step in range(4):
        with torch.set_grad_enabled(step % 2 == 1):
            out = call(x)
        p.event(f"out{step}", *history(out))
        if out.requires_grad:
            with p.backward():
                out.sum().backward()


@scenario(tags=(*TAGS, "no-grad"))
def aot_no_grad_inside(p: Probe) -> None:
    """What is computed under no_grad inside the function is a constant for its gradient."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            scale = a.abs().sum()
        return a / scale, scale

    out, scale = p.compile(run)(x)
    p.event("scale", *history(scale))
    with p.backward():
        (out * scale).square().sum().backward()


@scenario(tags=(*TAGS, "no-grad"))
def aot_enable_grad_inside_of_no_grad(p: Probe) -> None:
    """Under no_grad a function may switch grad on again for a part, whose result has history."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            kept = a.sin()
        return kept, kept * 2

    with torch.no_grad():
        kept, cut = p.compile(run)(x)
    p.event("histories", *history(kept), *history(cut))
    with p.backward():
        (kept * cut).sum().backward()


@scenario(tags=(*TAGS, "no-grad"))
def aot_pieces_made_with_grad_inside_of_no_grad(p: Probe) -> None:
    """Under no_grad a function may switch grad on and give the pieces of one value; each has history."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.unbind(a.sin() * 2)

    with torch.no_grad():
        pieces = p.compile(run)(x)
    for number, piece in enumerate(pieces):
        p.event(f"piece {number}", *history(piece), piece._is_view())
    with p.backward():
        (pieces[0] * pieces[2]).backward()


@scenario(tags=(*TAGS, "no-grad"))
def aot_views_made_with_grad_inside_of_no_grad(p: Probe) -> None:
    """Views of a value and of an input have the history of the grad mode that they were made in."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            made = a.cos() * 3
            inside, of_input = made[1:], a[:2]
        return made, inside, of_input, made[:2], a.view(3, 1)

    with torch.no_grad():
        outputs = p.compile(run)(x)
    for number, output in enumerate(outputs):
        p.event(f"output {number}", *history(output), output._is_view())
    with p.backward():
        (outputs[1] * outputs[2]).sum().backward()


@scenario(tags=(*TAGS, "no-grad"))
def aot_views_made_without_grad_inside(p: Probe) -> None:
    """Called with grad mode on, a function gives a view of a value, and of an input, made under no_grad."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, ...]:
        made = a.cos() * 3
        with torch.no_grad():
            inside, of_input = made[1:], a[:2]
        return made, inside, of_input, made[:2]

    outputs = p.compile(run)(x)
    for number, output in enumerate(outputs):
        p.event(f"output {number}", *history(output), output._is_view())
    with p.backward():
        (outputs[0].sum() + outputs[3].prod()).backward()


@scenario(tags=(*TAGS, "inference"))
def aot_inference_mode_around_a_call(p: Probe) -> None:
    """In inference mode a call gives an inference tensor; a call outside, before and after, does not."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    call = p.compile(lambda a: a.sin() * a)
    for step in range(3):
        with torch.inference_mode(step == 1):
            out = call(x)
        p.event(f"out{step}", out.is_inference(), *history(out))
        if step != 1:
            with p.backward():
                out.sum().backward()


@scenario(tags=(*TAGS, "inference"))
def aot_inference_tensor_as_argument(p: Probe) -> None:
    """A tensor that was made in inference mode takes part where it is not saved."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with torch.inference_mode():
        constant = p.randn(3) * 2
    out = p.compile(lambda a, b: a.sin() + b)(x, constant)
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "inference"))
def aot_grad_mode_left_switched_off(p: Probe) -> None:
    """A function that leaves grad mode switched off leaves it so for its caller."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        out = a.sin()
        torch.set_grad_enabled(False)
        return out

    try:
        out = p.compile(run)(x)
        p.event("enabled", torch.is_grad_enabled())
    finally:
        torch.set_grad_enabled(True)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_deterministic_algorithms(p: Probe) -> None:
    """With deterministic algorithms asked for around the second of three calls."""
    table, where = p.leaf("table", p.randn(4, 2, requires_grad=True)), p.randint(4, 6)
    call = p.compile(lambda t, i: t.index_select(0, i).cumsum(0))
    for step in range(3):
        torch.use_deterministic_algorithms(step == 1, warn_only=True)
        try:
            with p.backward():
                call(table, where).square().sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        p.value(f"grad{step}", table.grad)


@scenario(tags=(*TAGS, "errors"), issue="pytorch#149897")
def aot_anomaly_mode_around_forward_and_backward(p: Probe) -> None:
    """Under anomaly detection a NaN inside a compiled function's backward is a RuntimeError."""
    x = p.leaf("x", p.tensor([-1.0, 4.0], requires_grad=True))
    with torch.autograd.detect_anomaly():
        out = p.compile(lambda a: (a.sqrt() * 0).sum())(x)
        with p.backward():
            out.backward()


@scenario(tags=TAGS, issue="pytorch#149897")
def aot_anomaly_mode_names_the_node(p: Probe) -> None:
    """The error names the operation of the forward that made the NaN."""
    x = p.leaf("x", p.tensor([-1.0, 4.0], requires_grad=True))
    call = p.compile(lambda a: ((a * 2).sqrt() * 0).sum())
    with torch.autograd.detect_anomaly(), p.backward():
        try:
            call(x).backward()
        except RuntimeError as error:
            p.event("text", str(error))


@scenario(tags=TAGS)
def aot_anomaly_mode_for_a_sound_backward(p: Probe) -> None:
    """Under anomaly detection a sound backward gives the usual gradients."""
    x = p.leaf("x", p.rand(3, requires_grad=True))
    x.register_hook(p.hook("x"))
    call = p.compile(lambda a: a.sin().exp())
    for anomaly in (False, True, False):
        with torch.autograd.set_detect_anomaly(anomaly), p.backward():
            call(x).sum().backward()


@scenario(tags=(*TAGS, "dtype"), fp64=False)
def aot_default_dtype_of_each_call(p: Probe) -> None:
    """Tensors that the function makes have the default dtype of the call."""
    x = p.leaf("x", p.randn(2, requires_grad=True))
    call = p.compile(lambda a: a * torch.full((2,), 0.5, device=a.device))
    for step, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            out = call(x)
        finally:
            torch.set_default_dtype(before)
        p.event(f"dtype{step}", str(out.dtype))
        with p.backward():
            out.sum().backward()
