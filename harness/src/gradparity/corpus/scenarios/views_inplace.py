"""Views and in-place operations: histories that are rewritten after the fact.

In: a probe. Out: gradients through CopySlices and friends, hooks on changed tensors, and eager's refusals.
"""

from __future__ import annotations

import torch
from torch import nn

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import hook_every_node, node_of
from gradparity.probe import Probe


@scenario(tags=("in-place", "views"))
def in_place_on_a_view(p: Probe) -> None:
    """Multiplying a row in place rewrites the history of the whole tensor."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    base = x.sin()
    base[1].mul_(p.tensor([2.0, 3.0]))
    loss = (base * p.randn(3, 2)).sum()
    hook_every_node(p, loss)
    with p.backward():
        loss.backward()


@scenario(tags=("in-place", "views"))
def in_place_on_views_in_a_chain(p: Probe) -> None:
    """Three in-place operations on nested views, with the base and the views used afterwards."""
    x = p.leaf("x", p.randn(4, 4, requires_grad=True))
    base = x.sin()
    block = base[1:3]
    column = block[:, 2]
    column.sin_()
    block.mul_(2)
    base[0].add_(column.sum())
    with p.backward():
        (base.sum() + (column * block[:, 0]).sum()).backward()


@scenario(tags=("in-place", "views", "hooks"))
def hooks_before_and_after_in_place(p: Probe) -> None:
    """A hook stays with the version of the tensor that it was registered on."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("before"))
    y.mul_(3)
    y.register_hook(p.hook("after"))
    with p.backward():
        y.sum().backward()


@scenario(tags=("in-place", "views", "hooks"))
def hook_on_a_view_that_is_written_through_its_base(p: Probe) -> None:
    """After the base was changed, a view has a new history; its old hook is not called for it."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    base = x.sin()
    view = base[:2]
    view.register_hook(p.hook("old"))
    base.mul_(2)
    view.register_hook(p.hook("new"))
    with p.backward():
        (view * 3).sum().backward()


@scenario(tags=("in-place", "hooks"))
def retain_grad_before_in_place(p: Probe) -> None:
    """`retain_grad` follows the tensor to its new version: `.grad` is that of the final value."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.retain_grad()
    y.mul_(3)
    with p.backward():
        y.pow(2).sum().backward()
    p.value("y.grad", y.grad)


@scenario(tags=("in-place", "views"))
def rows_written_into_a_buffer(p: Probe) -> None:
    """A plain buffer that is filled row by row gets a history, and gradients reach every source."""
    rows = [p.leaf(f"row{i}", p.randn(3, requires_grad=True)) for i in range(3)]
    buffer = torch.zeros(4, 3, dtype=p.dtype, device=p.device)
    for i, row in enumerate(rows):
        buffer[i] = row.tanh()
        row.register_hook(p.hook(f"row{i}"))
    buffer[1:3] = buffer[0:2].clone()
    with p.backward():
        buffer.pow(2).sum().backward()


@scenario(tags=("in-place", "views"))
def index_put_with_repeats(p: Probe) -> None:
    """Writing and accumulating through indices, with repeated ones, sends each gradient to its source."""
    x = p.leaf("x", p.randn(5, requires_grad=True))
    values = p.leaf("values", p.randn(4, requires_grad=True))
    y = x.sin()
    index = p.tensor([0, 2, 2, 4])
    y.index_put_((index,), values.sin(), accumulate=True)
    y[y.detach() > 0.9] = 0.25
    with p.backward():
        y.prod().backward()


@scenario(tags=("views", "sums"))
def overlapping_windows(p: Probe) -> None:
    """Overlapping windows by `as_strided`: every element collects the gradients of its windows."""
    x = p.leaf("x", p.randn(6, requires_grad=True))
    windows = (x * 2).as_strided((4, 3), (1, 1))
    windows.register_hook(p.hook("windows"))
    with p.backward():
        (windows * p.randn(4, 3)).sum().backward()


@scenario(tags=("views", "layout"))
def transposed_leaf(p: Probe) -> None:
    """The `.grad` of a dense leaf takes the leaf's own strides, also when they are not contiguous."""
    x = p.leaf("x", p.randn(3, 4).t().requires_grad_())
    with p.backward():
        (x * p.randn(4, 3)).sum().backward()
        (x * p.randn(4, 3)).sum().backward()


@scenario(tags=("views", "layout"))
def expanded_leaf(p: Probe) -> None:
    """A leaf that overlaps itself gets a contiguous `.grad` of its full size."""
    x = p.leaf("x", p.randn(3, 1).expand(3, 4).requires_grad_())
    with p.backward():
        (x * p.randn(3, 4)).sum().backward()


@scenario(tags=("views", "layout"))
def strided_leaf(p: Probe) -> None:
    """A leaf with gaps between its elements gets a contiguous `.grad`."""
    x = p.leaf("x", p.randn(4, 6)[:, ::2].requires_grad_())
    with p.backward():
        (x.sin() * p.randn(4, 3)).sum().backward()


@scenario(tags=("in-place", "errors"))
def in_place_on_a_leaf(p: Probe) -> None:
    """Changing a leaf that requires a gradient in place is a RuntimeError, but allowed under no_grad."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with torch.no_grad():
        x.mul_(2)
    with p.backward():
        x.pow(2).sum().backward()
    x.mul_(2)


@scenario(tags=("in-place", "views", "errors"))
def in_place_on_a_view_of_a_leaf(p: Probe) -> None:
    """Changing a view of a leaf in place is a RuntimeError as well."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x[:2].mul_(2)


@scenario(tags=("in-place", "errors"))
def saved_tensor_changed_in_place(p: Probe) -> None:
    """A saved tensor that was changed is found by its version; leaves done before keep their `.grad`."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    last = p.leaf("last", p.randn(3, requires_grad=True))
    y = x.exp()
    out = y.sin() + last
    with torch.no_grad():
        y.add_(1)
    with p.backward():
        out.sum().backward()


@scenario(tags=("in-place", "errors"))
def detached_alias_changed_in_place(p: Probe) -> None:
    """Changing a detached alias of a saved tensor counts as changing the tensor."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    y.detach().zero_()
    with p.backward():
        y.sum().backward()


@scenario(tags=("in-place",))
def data_changed_behind_autograds_back(p: Probe) -> None:
    """A write through `.data` is not noticed: the gradient is that of the new value."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    y.data.fill_(2)
    with p.backward():
        y.sum().backward()


@scenario(tags=("in-place", "views", "errors"))
def in_place_on_one_of_several_views(p: Probe) -> None:
    """An output of a function with several views must not be changed in place."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    first, _ = x.sin().unbind(0)
    first.mul_(2)


@scenario(tags=("in-place",), issue="pytorch#185876")
def input_changed_after_it_was_copied(p: Probe) -> None:
    """Only copies of a tensor were saved, so changing the tensor before backward is fine."""
    x = p.randn(3, 3)
    y = p.leaf("y", p.randn(3, 3, requires_grad=True))
    product = p.compile(lambda a, b: a.t().clone() * b)(x, y)
    x.add_(1)
    with p.backward():
        product.sum().backward()


@scenario(tags=("in-place",))
def in_place_activations(p: Probe) -> None:
    """A network whose activations work in place; hooks sit on the tensors that were overwritten."""
    model = p.module(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.Sigmoid()))
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    hidden = model[0](x)
    hidden.register_hook(p.hook("linear"))
    model[1](hidden).register_hook(p.hook("relu"))
    with p.backward():
        model[3](model[2](hidden)).sum().backward()


@scenario(tags=("in-place", "views", "hooks"))
def node_hooks_on_copy_slices(p: Probe) -> None:
    """The CopySlices node that an in-place write leaves behind takes hooks like any other."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    y = p.leaf("y", p.randn(2, requires_grad=True))
    base = x.sin()
    base[0] = y.exp()
    node_of(base).register_prehook(p.hook("pre", lambda grads: (grads[0] * 2,), kind="node_pre"))
    node_of(base).register_hook(p.hook("post", kind="node_post"))
    with p.backward():
        (base * p.randn(3, 2)).sum().backward()


@scenario(tags=("in-place", "views"))
def in_place_shape_changes(p: Probe) -> None:
    """`t_`, `squeeze_` and `unsqueeze_` change a tensor's shape and history in place."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    y = x.sin()
    y.t_()
    y.unsqueeze_(0).squeeze_(0)
    y.register_hook(p.hook("y"))
    with p.backward():
        (y * p.randn(2, 3)).sum().backward()
