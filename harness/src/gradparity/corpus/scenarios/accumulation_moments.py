"""When each `.grad` is written: what overlaps it, what fails after it, what shares memory with it.

In: a probe. Out: gradients that show the order of accumulations, and their moment among the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _linear(p: Probe, n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """A batch, a weight and a bias."""
    w = p.leaf("w", p.randn(n, n, requires_grad=True))
    b = p.leaf("b", p.randn(n, requires_grad=True))
    return p.randn(4, n), w, b


def _error_of(run: Callable[[], Any]) -> str:
    """The class of what `run` raises."""
    try:
        run()
    except Exception as error:
        return type(error).__name__
    return "none"


@scenario(tags=("accumulation", "order"))
def gradients_of_one_layer_overlap(p: Probe) -> None:
    """Where the `.grad` of a weight and of its bias share memory, it shows which is added to first."""
    x, w, b = _linear(p)
    flat = torch.full((42,), 1e7, dtype=w.dtype, device=w.device)
    w.grad, b.grad = flat[:36].view(6, 6), flat[30:36]
    for _ in range(3):
        with p.backward():
            nn.functional.linear(x, w, b).sin().sum().backward()
    p.value("flat", flat)


@scenario(tags=("accumulation", "order"))
def gradients_of_two_layers_overlap(p: Probe) -> None:
    """As with one layer, where the gradients of different layers share memory."""
    x, w, b = _linear(p)
    v = p.leaf("v", p.randn(6, 6, requires_grad=True))
    flat = torch.full((60,), 1e6, dtype=w.dtype, device=w.device)
    w.grad, v.grad = flat[:36].view(6, 6), flat[24:].view(6, 6)
    for _ in range(2):
        with p.backward():
            (nn.functional.linear(x, w, b).tanh() @ v).sum().backward()
    p.value("flat", flat)


@scenario(tags=("accumulation", "order"))
def one_tensor_is_the_gradient_of_two_leaves(p: Probe) -> None:
    """Two leaves with one `.grad` add to it one after the other."""
    x, w, b = _linear(p)
    c = p.leaf("c", p.randn(6, requires_grad=True))
    b.grad = c.grad = torch.full((6,), 1e7, dtype=w.dtype, device=w.device)
    for _ in range(2):
        with p.backward():
            ((x @ w + b).sin() * c).sum().backward()


@scenario(tags=("accumulation",))
def one_accumulation_of_a_layer_fails(p: Probe) -> None:
    """What was added before an accumulation fails is there; what would have been added later is not."""
    x, w, b = _linear(p)
    w.grad = torch.ones(1, dtype=w.dtype, device=w.device).expand(6, 6)
    b.grad = torch.ones_like(b)
    with p.backward():
        p.event("error", _error_of((x @ w.t() + b).sum().backward))
    p.value("bias", b.grad)


@scenario(tags=("accumulation",))
def accumulation_of_the_bias_fails(p: Probe) -> None:
    """The same where the bias comes first."""
    x, w, b = _linear(p)
    w.grad = torch.ones_like(w)
    b.grad = torch.ones(1, dtype=w.dtype, device=w.device).expand(6)
    with p.backward():
        p.event("error", _error_of(nn.functional.linear(x, w, b).sum().backward))
    p.value("weight", w.grad)


@scenario(tags=("accumulation",))
def native_node_fails_after_an_accumulation(p: Probe) -> None:
    """A built-in node that fails leaves the gradients that were written before it."""
    a = p.leaf("a", p.randn(3, requires_grad=True))
    b = p.leaf("b", p.randn(3, requires_grad=True))
    kept = a * 1
    a.data = p.randn(4)
    with p.backward():
        p.event("error", _error_of(((a * 2)[:3] * b).sum().backward))
    p.value("b", b.grad)
    p.value("kept", kept.detach())


@scenario(tags=("accumulation", "aliasing"))
def gradient_shares_the_memory_of_an_earlier_weight(p: Probe) -> None:
    """A `.grad` that is the data of a weight changes that weight before the node that saved it runs."""
    ws = [p.leaf(f"w{i}", p.randn(3, 3, requires_grad=True)) for i in range(3)]
    ws[2].grad = ws[1].data
    h = p.randn(2, 3)
    for w in ws:
        h = (h @ w).sin()
    with p.backward():
        h.sum().backward()


@scenario(tags=("accumulation", "aliasing"))
def gradient_shares_the_version_of_an_earlier_weight(p: Probe) -> None:
    """A `.grad` that is a detached weight: eager sees that a saved tensor was changed, each time."""
    ws = [p.leaf(f"w{i}", p.randn(3, 3, requires_grad=True)) for i in range(3)]
    for _ in range(4):
        for w in ws:
            w.grad = None
        ws[2].grad = ws[1].detach()
        h = p.randn(2, 3)
        for w in ws:
            h = (h @ w).sin()
        with p.backward():
            p.event("error", _error_of(h.sum().backward))


@scenario(tags=("accumulation", "aliasing"))
def gradient_shares_the_memory_of_a_saved_activation(p: Probe) -> None:
    """The same with an activation that an earlier node saved."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    w = p.leaf("w", p.randn(4, requires_grad=True))
    h = x.sin()
    w.grad = h.data
    with p.backward():
        (h.exp() * w).sum().backward()


@scenario(tags=("accumulation", "steps"))
def gradients_accumulate_over_many_steps(p: Probe) -> None:
    """Accumulation over several micro-batches, cleared by None, by zeros, and not at all."""
    x, w, b = _linear(p)
    for step in range(9):
        if step == 3:
            w.grad = b.grad = None
        if step == 6:
            w.grad = torch.zeros_like(w)
        with p.backward():
            nn.functional.linear(x, w, b).tanh().sum().backward()
        p.event("step", w.grad, b.grad)


def _with_grad_dtype(p: Probe, dtype: torch.dtype, when: int, cleared: bool) -> None:
    """Five steps; from step `when` on, the gradients of a leaf have another dtype."""
    if p.is_reference:
        return
    w = p.leaf("w", p.randn(4, requires_grad=True))
    v = p.leaf("v", p.randn(4, requires_grad=True))
    for step in range(5):
        if step == when:
            w.grad = None
            w.grad_dtype = dtype
        if cleared:
            w.grad = None
        with p.backward():
            (w * 2 + v.sin()).sum().backward()
        grad: Any = w.grad
        p.event("dtype", str(grad.dtype))
    p.value("w", w.grad)


@scenario(tags=("accumulation", "dtypes"), fp64=False)
def grad_dtype_from_the_start(p: Probe) -> None:
    """The `.grad` of a leaf has the dtype that the leaf asks for."""
    _with_grad_dtype(p, torch.float64, 0, cleared=True)


@scenario(tags=("accumulation", "dtypes", "steps"), fp64=False)
def grad_dtype_after_some_steps(p: Probe) -> None:
    """The same where the leaf asks for it between two steps."""
    _with_grad_dtype(p, torch.float64, 3, cleared=True)


@scenario(tags=("accumulation", "dtypes", "steps"), fp64=False)
def grad_dtype_while_accumulating(p: Probe) -> None:
    """The same where steps add to what is there."""
    _with_grad_dtype(p, torch.float64, 2, cleared=False)


def _asking_later(p: Probe, step: Callable[[torch.Tensor], None]) -> None:
    """Four steps; from the third on, the leaf asks for gradients in float64. What they are made of is not
    rounded: float64 would show it."""
    if p.is_reference:
        return
    w = p.leaf("w", p.randn(4, requires_grad=True))
    for number in range(4):
        w.grad = None
        if number == 2:
            w.grad_dtype = torch.float64
        step(w)
        p.value(f"step {number}", w.grad)


@scenario(tags=("accumulation", "dtypes", "steps"), fp64=False)
def grad_dtype_where_gradients_meet(p: Probe) -> None:
    """Gradients that meet at a leaf are converted to the dtype that it asks for before they are added."""

    def step(w: torch.Tensor) -> None:
        with p.backward():
            (w * w + w * 3 + (w + 1) * 2).sum().backward()

    _asking_later(p, step)


@scenario(tags=("accumulation", "dtypes", "steps", "hooks"), fp64=False)
def grad_dtype_that_hooks_see(p: Probe) -> None:
    """Hooks of a leaf, and of its node, see gradients of the dtype that it asks for."""

    def step(w: torch.Tensor) -> None:
        y = w.view_as(w)
        node: Any = y.grad_fn.next_functions[0][0]
        handles = [
            w.register_hook(p.hook("w", lambda grad: grad * 3)),
            node.register_prehook(p.hook("node", kind="node_pre")),
            w.register_post_accumulate_grad_hook(p.hook("after", kind="post_accumulate")),
        ]
        with p.backward():
            (y * y + w * 3).sum().backward()
        for handle in handles:
            handle.remove()

    _asking_later(p, step)


@scenario(tags=("roots-inputs", "dtypes", "steps"), fp64=False)
def grad_dtype_of_what_is_returned(p: Probe) -> None:
    """`torch.autograd.grad` returns the gradient of a leaf in the dtype that it asks for."""

    def step(w: torch.Tensor) -> None:
        with p.backward():
            p.value("grad", torch.autograd.grad((w * w + w * 3).sum(), w)[0])

    _asking_later(p, step)


class _PropertyParameter(nn.Parameter):
    """A parameter that counts who asks for its `.grad`, and who compares it."""

    asked = 0

    @property
    def grad(self) -> Any:
        _PropertyParameter.asked += 1
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        _PropertyParameter.asked += 1
        torch.Tensor.grad.__set__(self, value)


@scenario(tags=("accumulation", "subclasses"))
def subclass_has_a_property_called_grad(p: Probe) -> None:
    """Eager's C++ calls neither the getter nor the setter of a subclass."""
    x = p.randn(4)
    w = _PropertyParameter(p.randn(4))
    _PropertyParameter.asked = 0
    for _ in range(3):
        with p.backward():
            (w * x).sum().backward()
    p.event("asked", _PropertyParameter.asked)
    p.value("w", torch.Tensor.grad.__get__(w))


class _Incomparable(Tensor):
    """A tensor whose comparison raises."""

    def __eq__(self, other: object) -> Any:
        raise AssertionError("compared")

    __hash__ = Tensor.__hash__


@scenario(tags=("accumulation", "subclasses"))
def gradient_that_cannot_be_compared(p: Probe) -> None:
    """A `.grad` whose class forbids ``==`` is added to nevertheless."""
    w = p.leaf("w", p.randn(4, requires_grad=True))
    w.grad = torch.ones_like(w).as_subclass(_Incomparable)
    for _ in range(3):
        with p.backward():
            w.sin().sum().backward()


def _of_layout(p: Probe, layout: str, steps: int = 3) -> None:
    """Gradients of a leaf without strides, asked for in each way."""
    dense = p.randn(4, 4) * (torch.arange(16).view(4, 4) % 3 == 0).to(p.randn(1))
    leaf = dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()
    leaf.requires_grad_()
    for _ in range(steps):
        with p.backward():
            (grad,) = torch.autograd.grad(leaf.to_dense().sin().sum(), (leaf,))
            leaf.to_dense().sin().sum().backward(inputs=[leaf])
        p.value("grad", grad.to_dense())
    total: Any = leaf.grad
    p.value("leaf", total.to_dense())


@scenario(tags=("roots", "sparse"))
def inputs_of_coo_layout(p: Probe) -> None:
    """Gradients with respect to a sparse leaf, which has no views."""
    _of_layout(p, "coo")


@scenario(tags=("roots", "sparse"))
def inputs_of_csr_layout(p: Probe) -> None:
    """The same in CSR layout."""
    _of_layout(p, "csr", 1)
