"""What changes around a compiled forward after it was compiled: hooks, dtypes of gradients, modes,
versions.

In: a probe, whose `compile` is the identity for eager. Out: gradients, hook events, or eager's errors. One
scenario for each kind of hook and each module; one for each way of using autocast; one for each change in
place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.function_contracts import Counting, Exponential, Square
from gradparity.probe import Probe

TAGS = ("compiled", "after-the-first-call")


class Two(nn.Module):
    """Two linear layers and an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The second layer of the first."""
        result: Tensor = self.second(self.first(x).tanh())
        return result


def _forward(p: Probe, module: nn.Module, site: str) -> Any:
    return module.register_forward_hook(p.hook(site, lambda m, i, o: o * 3, kind="module_forward"))


def _forward_pre(p: Probe, module: nn.Module, site: str) -> Any:
    hook = p.hook(site, lambda m, i: (i[0] * 3,), kind="module_forward_pre")
    return module.register_forward_pre_hook(hook)


def _full_backward(p: Probe, module: nn.Module, site: str) -> Any:
    def scaled(_: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if grad is None else grad * 3 for grad in grad_input)

    return module.register_full_backward_hook(p.hook(site, scaled, kind="module_full"))


def _full_backward_pre(p: Probe, module: nn.Module, site: str) -> Any:
    hook = p.hook(site, lambda m, grads: (grads[0] * 3,), kind="module_full_pre")
    return module.register_full_backward_pre_hook(hook)


HOOKS: dict[str, Callable[[Probe, nn.Module, str], Any]] = {
    "forward": _forward,
    "forward_pre": _forward_pre,
    "full_backward": _full_backward,
    "full_backward_pre": _full_backward_pre,
}

MODULES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the_whole": lambda model: model,
    "a_part": lambda model: model.get_submodule("first"),
}


def _register_hook(kind: str, which: str, before: int) -> None:
    def body(p: Probe) -> None:
        model = p.module(Two())
        run, module = p.compile(model), MODULES[which](model)
        x = p.leaf("x", p.randn(2, 4, requires_grad=True))

        def step() -> None:
            out = run(x)
            with p.backward():
                out.pow(2).sum().backward()

        for number in range(before):
            HOOKS[kind](p, module, f"there before {number}")
        step()
        handle = HOOKS[kind](p, module, "later")
        step()
        step()
        handle.remove()
        step()

    body.__name__ = f"hook_set_later_{kind}_{which}_beside_{before}"
    text = (
        f"A {kind} hook of {which} that is set between two calls, beside {before} others, and removed again."
    )
    body.__doc__ = text.replace("_", " ")
    scenario(tags=(*TAGS, "hooks", "module"), issue="pytorch#117265")(body)


for _kind in HOOKS:
    for _which in MODULES:
        for _before in (0, 1):
            _register_hook(_kind, _which, _before)


@scenario(tags=(*TAGS, "hooks", "module"), issue="pytorch#117265")
def hook_set_later_is_another_one(p: Probe) -> None:
    """A forward hook that is replaced by another between two calls."""
    model = p.module(Two())
    run = p.compile(model)
    for factor in (2, 5, 7):
        handle = model.first.register_forward_hook(lambda m, i, o, factor=factor: o * factor)
        out = run(p.randn(2, 4))
        with p.backward():
            out.pow(2).sum().backward()
        handle.remove()


@scenario(tags=(*TAGS, "accumulate"))
def grad_dtype_of_a_compiled_leaf(p: Probe) -> None:
    """A leaf that asks for gradients of another dtype gets them, summed in it, from a compiled forward."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    x.grad_dtype = torch.float64
    call = p.compile(lambda a: (a.sin() / 3).sum() + Square.apply(a).sum())
    for _ in range(2):
        out = call(x)
        with p.backward():
            out.backward()


@scenario(tags=(*TAGS, "accumulate"))
def grad_dtype_that_is_set_after_the_first_call(p: Probe) -> None:
    """The parameters of a compiled module ask for another dtype of their gradients between two calls."""
    model = p.module(Two())
    run = p.compile(model)
    for step in range(3):
        if step == 1:
            for parameter in model.parameters():
                parameter.grad = None
                parameter.grad_dtype = torch.float64
        out = run(p.randn(2, 4))
        with p.backward():
            out.pow(2).sum().backward()


class Product(torch.autograd.Function):
    """A matrix product, whose backward is one too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad.to(w.dtype) @ w.t(), x.t() @ grad.to(x.dtype)


class CountedProduct(Product):
    """The same, with a context that is written in the backward, so that it cannot be part of a graph."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the product."""
        ctx.seen = True
        return Product.backward(ctx, grad)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "operators": lambda x, w: (x @ w).softmax(-1),
    "function": lambda x, w: Product.apply(x, w),
    "function_kept_whole": lambda x, w: CountedProduct.apply(x, w),
}


def _register_autocast(product: str, around: str) -> None:
    def body(p: Probe) -> None:
        call = p.compile(PRODUCTS[product])
        for step in range(2):
            x = p.leaf(f"x{step}", p.randn(3, 4, requires_grad=True))
            w = p.leaf(f"w{step}", p.randn(4, 4, requires_grad=True))
            with torch.autocast(p.device.type, torch.bfloat16, enabled="forward" in around):
                out = call(x, w)
            with p.backward(), torch.autocast(p.device.type, torch.bfloat16, enabled="backward" in around):
                out.float().pow(2).sum().backward()

    body.__name__ = f"autocast_around_{around}_of_{product}"
    text = f"Autocast around the {around} only holds there, for a matrix product by {product}."
    body.__doc__ = text.replace("_", " ")
    scenario(tags=(*TAGS, "autocast"), fp64=False)(body)


for _product in PRODUCTS:
    for _around in ("forward", "backward", "forward_and_backward"):
        _register_autocast(_product, _around)


#: what a compiled forward computes from a leaf's double, and what eager saves of it.
SAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "input": lambda x: x.sin() * x.cos(),
    "output": lambda x: x.exp(),
    "output_and_more": lambda x: x.exp().sigmoid(),
    "nothing": lambda x: x * 3 + 1,
    "input_of_a_function": lambda x: Square.apply(x),
    "output_of_a_function": lambda x: Exponential.apply(x),
    "input_of_a_kept_function": lambda x: Counting.apply(x).sin() + Square.apply(x),
}


def _register_change(saving: str, changed: str) -> None:
    def body(p: Probe) -> None:
        x = p.leaf("x", p.randn(4, requires_grad=True))
        between = x * 2
        out = p.compile(SAVING[saving])(between)
        loss = out.sum() + between.sum()
        with torch.no_grad():
            (between if changed == "input" else out).add_(1)
        with p.backward():
            loss.backward()

    body.__name__ = f"{changed}_changed_after_a_forward_that_saves_{saving}"
    text = f"An {changed} that is changed in place before the backward of a forward that saves {saving}."
    body.__doc__ = text.replace("_", " ")
    raises = ("errors",) if saving.startswith(changed) else ()
    scenario(tags=(*TAGS, "in-place", *raises), issue="pytorch#197887")(body)


for _saving in SAVING:
    for _changed in ("input", "output"):
        _register_change(_saving, _changed)


@scenario(tags=(*TAGS, "in-place"))
def input_changed_that_is_read_to_recompute(p: Probe) -> None:
    """What eager has computed from an input, and saved, does not change when the input changes."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    other = p.randn(4)
    out = p.compile(lambda a, b: a * (b.cos() + 1).sin().exp())(x, other)
    other.add_(1)
    with p.backward():
        out.sum().backward()


def _raised_by(p: Probe, fn: Callable[..., Any], *args: Any) -> None:
    try:
        fn(*args)
    except RuntimeError as error:
        p.event("raised", type(error).__name__)


@scenario(tags=TAGS)
def error_after_a_change_in_place(p: Probe) -> None:
    """An operation that raises comes after all that the function has done before, also in Python."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    changed = p.watch("changed", p.randn(4))

    def fails(a: Tensor, b: Tensor) -> Tensor:
        b.add_(1)
        return (a * b) @ torch.ones(3, dtype=a.dtype, device=a.device)

    call = p.compile(fails)
    for _ in range(2):
        _raised_by(p, call, x, changed)


@scenario(tags=TAGS)
def error_in_a_compiled_module(p: Probe) -> None:
    """A module that is given the wrong width raises, and goes on with the right one."""
    model = p.module(Two())
    run = p.compile(model)
    _raised_by(p, run, p.randn(2, 3))
    out = run(p.randn(2, 4))
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "func"))
def forward_mode_through_a_compiled_function(p: Probe) -> None:
    """A tangent goes through a compiled function, before and after a backward through it."""
    call = p.compile(lambda a: a.sin() * a.sum())
    x = p.leaf("x", p.randn(4, requires_grad=True))
    for step in range(2):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(p.randn(4), p.randn(4))
            p.value(f"tangent{step}", torch.autograd.forward_ad.unpack_dual(call(dual)).tangent)
        out = call(x)
        with p.backward():
            out.sum().backward()
