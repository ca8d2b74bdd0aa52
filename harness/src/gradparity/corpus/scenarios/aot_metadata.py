"""Functions compiled ahead that change their inputs' sizes, strides, storage, or both data and sizes.

In: a probe, whose `compile` is the identity for eager. Out: how the caller's tensors lie in memory
afterwards, and gradients through them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.storages import history, layout, share
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "in-place", "views")


@scenario(tags=TAGS)
def aot_input_transposed_in_place(p: Probe) -> None:
    """`t_` turns the caller's tensor without touching its memory."""
    a, w = p.randn(2, 3), p.leaf("w", p.randn(3, requires_grad=True))
    place = a.data_ptr()

    def run(a: Tensor, w: Tensor) -> Tensor:
        a.t_()
        return w @ a

    out = p.compile(run)(a, w)
    p.value("a", a)
    p.event("layout", *layout(a), a.data_ptr() == place)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_input_unsqueezed_in_place_twice(p: Probe) -> None:
    """Each of two calls gives the caller's tensor one more dimension."""
    a, w = p.randn(3), p.leaf("w", p.randn(3, requires_grad=True))

    def run(a: Tensor, w: Tensor) -> Tensor:
        a.unsqueeze_(0)
        return a * w

    call = p.compile(run)
    for step in range(2):
        out = call(a, w)
        p.event(f"layout{step}", *layout(a))
        with p.backward():
            out.sum().backward()


@scenario(tags=TAGS)
def aot_data_and_sizes_change(p: Probe) -> None:
    """Scaled and turned: the caller sees both."""
    a, w = p.randn(2, 3), p.leaf("w", p.randn(2, requires_grad=True))

    def run(a: Tensor, w: Tensor) -> Tensor:
        a.mul_(2)
        a.transpose_(0, 1)
        a[0].add_(1)
        return a @ w

    out = p.compile(run)(a, w)
    p.value("a", a)
    p.event("layout", *layout(a))
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_sizes_of_an_intermediate_change(p: Probe) -> None:
    """An intermediate of the caller's graph is unsqueezed inside: its later gradient has the new sizes."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        a.unsqueeze_(1)
        return a.sin()

    h = x * 2
    out = p.compile(run)(h)
    h.register_hook(p.hook("h"))
    p.event("layout", *layout(h), *history(h))
    with p.backward():
        (out * h.exp()).sum().backward()


@scenario(tags=TAGS)
def aot_squeezed_and_scaled_intermediate(p: Probe) -> None:
    """An intermediate is squeezed and scaled in place, and returned as well."""
    x = p.leaf("x", p.randn(1, 3, requires_grad=True))
    h = x + 1
    out = p.compile(lambda a: a.squeeze_(0).mul_(3))(h)
    p.event("same object", out is h, *layout(h))
    with p.backward():
        (out * p.randn(3)).sum().backward()


@scenario(tags=TAGS)
def aot_input_resized_smaller(p: Probe) -> None:
    """`resize_` keeps the first elements of the caller's memory."""
    a, w = p.randn(6), p.leaf("w", p.randn(2, 2, requires_grad=True))

    def run(a: Tensor, w: Tensor) -> Tensor:
        a.resize_(2, 2)
        return a * w

    out = p.compile(run)(a, w)
    p.value("a", a)
    p.event("layout", *layout(a), a.untyped_storage().nbytes() // a.element_size())
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_input_resized_larger_and_filled(p: Probe) -> None:
    """`resize_` beyond the end makes the caller's storage larger."""
    a, w = p.randn(2), p.leaf("w", p.randn(5, requires_grad=True))

    def run(a: Tensor, w: Tensor) -> Tensor:
        a.resize_(5)
        a.fill_(2)
        return a * w

    out = p.compile(run)(a, w)
    p.value("a", a)
    p.event("elements", a.untyped_storage().nbytes() // a.element_size())
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_input_set_to_another_storage(p: Probe) -> None:
    """`set_` makes the caller's tensor an alias of another one."""
    a, b, w = p.randn(3), p.randn(4), p.leaf("w", p.randn(4, requires_grad=True))

    def run(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        a.set_(b)
        return a * w

    out = p.compile(run)(a, b, w)
    p.value("a", a)
    p.event("shares", share(a, b), *layout(a))
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_storage_freed_after_use(p: Probe) -> None:
    """A buffer's storage is emptied inside, as sharded training does, and filled with others' data later."""
    x, full = p.leaf("x", p.randn(3, requires_grad=True)), p.randn(3)

    def run(a: Tensor, b: Tensor) -> Tensor:
        out = a * b.exp()
        b.untyped_storage().resize_(0)
        return out

    out = p.compile(run)(x, full)
    p.event("freed", full.untyped_storage().nbytes(), *layout(full))
    full.untyped_storage().resize_(full.numel() * full.element_size())
    full.fill_(3)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_data_replaced_inside(p: Probe) -> None:
    """`.data = ` gives a buffer other memory of other sizes."""
    x, buffer = p.leaf("x", p.randn(2, 2, requires_grad=True)), p.randn(3)
    fresh = p.randn(2, 2)

    def run(a: Tensor, b: Tensor, new: Tensor) -> Tensor:
        b.data = new
        return a * b

    out = p.compile(run)(x, buffer, fresh)
    p.value("buffer", buffer)
    p.event("shares", share(buffer, fresh))
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "no-grad"))
def aot_parameter_switched_to_grad_inside(p: Probe) -> None:
    """`requires_grad_()` on a plain input, inside: the input is a leaf with a gradient afterwards."""
    a = p.leaf("a", p.randn(3))

    def run(t: Tensor) -> Tensor:
        t.requires_grad_()
        return t.sin().sum()

    out = p.compile(run)(a)
    p.event("a", *history(a))
    with p.backward():
        out.backward()


@scenario(tags=TAGS)
def aot_detached_in_place(p: Probe) -> None:
    """`detach_` on an intermediate cuts its history off for the caller too."""
    x, w = (p.leaf(name, p.randn(3, requires_grad=True)) for name in ("x", "w"))

    def run(a: Tensor, b: Tensor) -> Tensor:
        a.detach_()
        return a * b

    h = x * 2
    out = p.compile(run)(h, w)
    p.event("h", *history(h))
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "layout"))
def aot_channels_last_output_and_gradient(p: Probe) -> None:
    """A convolution in channels-last gives a channels-last result and gradients in the leaves' layouts."""
    image = p.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    weight = p.leaf("weight", p.randn(4, 3, 3, 3, requires_grad=True))
    p.leaf("image", image)
    out = p.compile(lambda a, b: torch.nn.functional.conv2d(a, b).relu())(image, weight)
    p.event("strides", tuple(out.stride()))
    with p.backward():
        out.square().sum().backward()


@scenario(tags=(*TAGS, "modes"))
def aot_sizes_of_a_leaf_change_without_history(p: Probe) -> None:
    """Under `no_grad` a leaf may change its sizes in place; its gradient has the new ones."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "turned": lambda t: t.t_(),
        "squeezed": lambda t: t.squeeze_(0),
        "unsqueezed": lambda t: t.unsqueeze_(0),
        "strided": lambda t: t.as_strided_((2,), (1,)),
    }
    for name, change in changes.items():
        x = p.leaf(name, p.randn(1, 3, requires_grad=True))

        def run(a: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            with torch.no_grad():
                change(a)
            return a.exp()

        out = p.compile(run)(x)
        p.event(name, *layout(x), *layout(out))
        with p.backward():
            out.sum().backward()


@scenario(tags=(*TAGS, "aliasing"))
def aot_sizes_of_one_of_two_that_share_memory_change(p: Probe) -> None:
    """An input changes its sizes in place; another one that shows the same memory keeps its own."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    for name, part in {"all": slice(None), "a part": slice(1, None)}.items():
        base = p.randn(3, 3)
        shown = base[part]

        def run(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            b.t_()
            return (a * w).sum() + (w[: b.shape[1]] * b).sum(), b

        out, returned = p.compile(run)(base, shown, w)
        p.event(name, returned is shown, *layout(shown), *layout(base), shown._version, base._version)
        with p.backward():
            out.backward()


#: results that are contiguous whatever is given; torch's fake kernels say otherwise.
ORDERED: dict[str, Callable[[Tensor], Tensor]] = {
    "power of a number": lambda t: torch.pow(2, t),
    "log sigmoid": functional.logsigmoid,
    "squares": lambda t: functional.mse_loss(t, torch.zeros_like(t), reduction="none"),
    "smooth": lambda t: functional.smooth_l1_loss(t, torch.zeros_like(t), reduction="none"),
    "huber": lambda t: functional.huber_loss(t, torch.zeros_like(t), reduction="none"),
    "log softmax": lambda t: functional.log_softmax(t, -1),
    "membership": lambda t: torch.isin(t, t[0, 0, :1]).to(t.dtype) * t,
}


@scenario(tags=("compiled", "aot", "metadata"))
def aot_results_of_permuted_inputs(p: Probe) -> None:
    """Results and gradients lie as in eager, and a product with a constant folds the same dimensions."""
    weight = p.rand(2, 5)
    for name, function in ORDERED.items():
        for order in ((0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 0, 2)):

            def run(t: Tensor, function: Callable[[Tensor], Tensor] = function) -> tuple[Tensor, Tensor]:
                result = function(t)
                return result, functional.linear(result, weight) if result.shape[-1] == 5 else result.sin()

            x = p.rand(*(6, 5, 5)).permute(order).requires_grad_() * 1
            results = p.compile(run)(x)
            with p.backward():
                (grad,) = torch.autograd.grad(sum(each.square().sum() for each in results), x)
            p.value(f"{name} {order}", (*results, grad))
            p.event(f"{name} {order}", *[each.stride() for each in (*results, grad)])
