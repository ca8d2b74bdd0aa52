"""Accumulation in unusual forms: sparse, mkldnn, complex, overlapping and empty gradients; who keeps them.

In: a probe. Out: `.grad` with its layout, strides and dtype, and whether it shares memory with others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _grad(leaf: Tensor) -> Any:
    """The `.grad`, which is there."""
    return leaf.grad


def _accumulate_node(leaf: Tensor) -> Any:
    """The AccumulateGrad node of a leaf."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def _shares(a: Tensor, b: Tensor) -> bool:
    return bool(a.data_ptr() == b.data_ptr())


@scenario(tags=("accumulation", "identity", "hooks"))
def gradient_is_stolen_past_post_hooks(p: Probe) -> None:
    """Post hooks of an AccumulateGrad node see the very memory that became `.grad`."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    for _ in range(2):
        node = _accumulate_node(x)
        node.register_hook(lambda ins, outs: p.event("shares", _shares(outs[0], _grad(x))))
        node.register_hook(p.hook("post", kind="post"))
        x.grad = None
        with p.backward():
            (x.view(2, 2) * 2).sum().backward()


@scenario(tags=("accumulation", "identity", "hooks"))
def gradient_of_two_leaves_past_post_hooks(p: Probe) -> None:
    """One gradient for two leaves, one of which has a post hook: who copies and who takes it over."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    y = p.leaf("y", p.randn(4, requires_grad=True))
    node = _accumulate_node(x)
    node.register_hook(lambda ins, outs: p.event("shares", _shares(outs[0], _grad(x))))
    with p.backward():
        (x + y).exp().sum().backward()
    p.event("share", _shares(x.grad, _grad(y)))


@scenario(tags=("accumulation", "identity", "hooks"))
def gradient_kept_by_a_hook_is_copied(p: Probe) -> None:
    """A gradient that a hook keeps is copied; one that it only looks at is taken over."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    y = p.leaf("y", p.randn(4, requires_grad=True))
    kept: list[Tensor] = []
    address: list[int] = []
    x.register_hook(lambda g: kept.append(g))
    y.register_hook(lambda g: address.append(g.data_ptr()))
    with p.backward():
        (x.exp() * y.sin()).sum().backward()
    p.event("x", _shares(kept[0], _grad(x)))
    p.event("y", address[0] == _grad(y).data_ptr())
    kept[0].zero_()


@scenario(tags=("accumulation", "identity", "hooks"))
def gradient_kept_as_a_view(p: Probe) -> None:
    """A view of a gradient that a hook keeps does not prevent that the gradient is taken over."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    kept: list[Tensor] = []
    x.register_hook(lambda g: kept.append(g[:2]))
    with p.backward():
        (x.exp() * 2).sum().backward()
    p.event("shares", _shares(kept[0], _grad(x)))
    kept[0].zero_()


class SparseGradient(Function):
    """Its gradient is sparse, and made of values that somebody else holds too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, values: Tensor, coalesced: bool) -> Tensor:
        ctx.made = torch.sparse_coo_tensor(indices, values, x.shape, is_coalesced=coalesced)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        made, ctx.made = ctx.made, None
        return made, None, None, None


@scenario(tags=("accumulation", "sparse", "identity"))
def sparse_gradients_and_their_values(p: Probe) -> None:
    """Whether a sparse `.grad` shares its values with the gradient, is coalesced, and takes a second one."""
    indices = torch.tensor([[0, 2]])
    for coalesced in (True, False):
        values = p.randn(2)
        x = p.leaf(f"x{coalesced}", p.randn(4, requires_grad=True))
        with p.backward():
            SparseGradient.apply(x, indices, values, coalesced).backward()
            first = _grad(x)
            p.event("first", first.is_coalesced(), _shares(first._values(), values))
            SparseGradient.apply(x, indices, p.randn(2), coalesced).backward()
        p.event("second", x.grad is first, _grad(x).is_coalesced())
        values.zero_()


@scenario(tags=("accumulation", "sparse"))
def sparse_on_dense_and_dense_on_sparse(p: Probe) -> None:
    """Dense on a sparse `.grad` makes a new dense one; sparse on a dense one is added in place."""
    indices = torch.tensor([[0, 2]])
    x = p.leaf("x", p.randn(4, requires_grad=True))
    y = p.leaf("y", p.randn(4, requires_grad=True))
    with p.backward():
        SparseGradient.apply(x, indices, p.randn(2), False).backward()
        sparse = x.grad
        x.exp().sum().backward()
        y.exp().sum().backward()
        dense = y.grad
        SparseGradient.apply(y, indices, p.randn(2), False).backward()
    p.event("same", x.grad is sparse, y.grad is dense)


@scenario(tags=("accumulation", "sparse"))
def sparse_leaf(p: Probe) -> None:
    """A sparse leaf gets the gradient that its operations give, twice."""
    dense = p.randn(3, 3)
    x = p.leaf("x", dense.to_sparse().requires_grad_())
    m = p.leaf("m", p.randn(3, 2, requires_grad=True))
    for _ in range(2):
        with p.backward():
            torch.sparse.mm(x, m).sin().sum().backward()
        p.event("layout", str(_grad(x).layout))


@scenario(tags=("accumulation", "sparse"))
def compressed_leaf(p: Probe) -> None:
    """A leaf in compressed rows multiplies a dense matrix; both get a gradient."""
    x = p.leaf("x", torch.eye(3, dtype=p.dtype, device=p.device).to_sparse_csr().requires_grad_())
    m = p.leaf("m", p.randn(3, 2, requires_grad=True))
    for _ in range(2):
        with p.backward():
            (x @ m).sum().backward()
        p.event("layout", str(_grad(x).layout))


@scenario(tags=("accumulation",), fp64=False)
def mkldnn_gradient(p: Probe) -> None:
    """A gradient in mkldnn's layout reaches a leaf of that layout."""
    x = p.leaf("x", p.randn(4, 4).to_mkldnn().requires_grad_())
    for _ in range(2):
        with p.backward():
            torch.relu(x).to_dense().pow(2).sum().backward()
        p.event("layout", str(_grad(x).layout))


@scenario(tags=("accumulation", "layout"))
def overlapping_gradients(p: Probe) -> None:
    """Expanded, overlapping and gapped gradients from a Function, for leaves of several layouts."""

    class Give(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, give: Any) -> Tensor:
            ctx.give = give
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return ctx.give(), None

    base = p.randn(24)
    gradients = {
        "expanded": lambda: base[:3].expand(2, 3),
        "overlapping": lambda: base.as_strided((2, 3), (1, 1)),
        "gapped": lambda: base.as_strided((2, 3), (12, 2)),
        "transposed": lambda: base[:6].view(3, 2).t(),
        "offset": lambda: base[6:12].view(2, 3),
        "fresh": lambda: base[:6].view(2, 3).clone(),
    }
    for name, give in gradients.items():
        for kind, leaf in (("rows", p.randn(2, 3)), ("columns", p.randn(3, 2).t())):
            x = p.leaf(f"{name}_{kind}", leaf.requires_grad_())
            with p.backward():
                Give.apply(x, give).backward()
            p.event("shares", _shares(_grad(x), base))
    base.zero_()


@scenario(tags=("accumulation",))
def leaves_that_are_views(p: Probe) -> None:
    """Leaves that are views of a tensor without gradient, among them overlapping ones, and of one another."""
    base = p.randn(12)
    x = p.leaf("x", base[2:8].view(2, 3).requires_grad_())
    y = p.leaf("y", base.as_strided((3, 2), (2, 3)).requires_grad_())
    z = p.leaf("z", base.as_strided((3, 2), (1, 1)).detach().requires_grad_())
    w = p.leaf("w", base.expand(2, 12).requires_grad_())
    for _ in range(2):
        with p.backward():
            (x.sin().sum() + (y * z).sum() + w.pow(2).sum()).backward()
    p.event("strides", *(_grad(leaf).stride() for leaf in (x, y, z, w)))


@scenario(tags=("accumulation", "views"))
def as_strided_of_an_intermediate(p: Probe) -> None:
    """Gradients of `as_strided` with overlaps, gaps and an offset, of bases of several layouts."""
    x = p.leaf("x", p.randn(4, 5, requires_grad=True))
    for base in (x * 2, (x * 2).t(), (x * 2)[1:, ::2]):
        with p.backward():
            piece = base.as_strided((2, 3), (1, 2), 3)
            (piece * piece + base.as_strided((3, 3), (1, 1), 2).sum()).sum().backward()


@scenario(tags=("accumulation", "dtype"))
def complex_gradients_accumulate(p: Probe) -> None:
    """Complex leaves with conjugate and negated views as gradients, twice; the views are made real."""
    a, b = p.randn(3, requires_grad=True), p.randn(3)
    x = p.leaf("x", torch.complex(p.randn(3), p.randn(3)).requires_grad_())
    p.leaf("a", a)
    for _ in range(2):
        with p.backward():
            (x.conj() * torch.complex(a, b)).imag.sum().backward()
            x.conj().backward(torch.complex(b, b).conj())
        p.event("bits", _grad(x).is_conj(), _grad(x).is_neg())


@scenario(tags=("accumulation", "dtype", "modes"))
def autocast_forward_in_low_precision(p: Probe) -> None:
    """Weights in float32 used under autocast: the casts are cached, and gradients come back as float32."""
    w = p.leaf("w", p.randn(4, 4, requires_grad=True))
    v = p.leaf("v", p.randn(4, 4, requires_grad=True))
    x = p.randn(3, 4)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(p.device.type, dtype):
            y = torch.tanh(x @ w) @ v @ w
        y.register_hook(p.hook("y"))
        with p.backward():
            y.float().sum().backward()


@scenario(tags=("accumulation",))
def gradients_without_elements(p: Probe) -> None:
    """Leaves of no element or no dimension, with views, cuts and sums that give them."""
    x = p.leaf("x", p.randn(0, 3, requires_grad=True))
    y = p.leaf("y", p.randn(requires_grad=True))
    z = p.leaf("z", p.randn(2, 3, requires_grad=True))
    for _ in range(2):
        with p.backward():
            (x.sum() + y * 2 + z[:0].sum() + z[1, 2] * y + torch.cat([x, z]).sum()).backward()


@scenario(tags=("accumulation", "in-place"))
def in_place_chains_on_strided_views(p: Probe) -> None:
    """In-place operations on transposed, strided and overlapping views of one tensor, one after the other."""
    x = p.leaf("x", p.randn(4, 4, requires_grad=True))
    w = p.leaf("w", p.randn(4, requires_grad=True))
    y = x * 1
    y.t()[1].mul_(w)
    y[::2, 1].add_(w[:2])
    y.diagonal().copy_(w * 2)
    y.view(-1)[3:7].neg_()
    y.select(0, 2).zero_()
    y.register_hook(p.hook("y"))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("accumulation", "in-place"))
def in_place_on_multi_output_and_chunks(p: Probe) -> None:
    """`unsafe_split` pieces and a narrow of a narrow may be changed in place."""
    x = p.leaf("x", p.randn(6, 2, requires_grad=True))
    y = x.clone()
    pieces = torch.unsafe_split(y, 3)
    pieces[1].mul_(2)
    z = x.clone()
    z.narrow(0, 1, 4).narrow(0, 1, 2).sin_()
    with p.backward():
        (sum(piece.sum() for piece in pieces) + z.pow(2).sum()).backward()


@scenario(tags=("accumulation", "in-place"))
def in_place_with_complex_views(p: Probe) -> None:
    """In-place writes through `real`, `imag` and `view_as_real` of a complex tensor."""
    x = p.leaf("x", torch.complex(p.randn(3), p.randn(3)).requires_grad_())
    y = x * 1
    y.real.mul_(2)
    torch.view_as_real(y)[0].zero_()
    y.imag[2].add_(y.real[1])
    with p.backward():
        y.abs().sum().backward()


@scenario(tags=("accumulation",))
def grad_replaced_while_running(p: Probe) -> None:
    """A hook that replaces, clears or writes to another leaf's `.grad` before that leaf is accumulated."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    z = p.leaf("z", p.randn(3, requires_grad=True))
    x.grad, y.grad, z.grad = p.randn(3), p.randn(3), None

    def change(_: Tensor) -> None:
        x.grad, z.grad = None, torch.ones_like(z)
        _grad(y).zero_()

    h = x.sin() * y.cos() * z.exp()
    h.register_hook(change)
    with p.backward():
        h.sum().backward()


@scenario(tags=("accumulation",))
def leaf_that_needs_no_gradient_any_more(p: Probe) -> None:
    """A leaf that was frozen after the forward still has its node in the graph: what becomes of it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    root = (x * y).sum()
    x.requires_grad_(False)
    with p.backward():
        root.backward()


@scenario(tags=("accumulation", "dtype"))
def leaf_whose_data_changes_its_dtype(p: Probe) -> None:
    """A leaf whose data was replaced between forward and backward keeps the gradient's dtype."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_post_accumulate_grad_hook(p.hook("x", kind="post_acc"))
    root = (x * 2).sum()
    x.data = x.data.to(torch.float16)
    with p.backward():
        root.backward()
