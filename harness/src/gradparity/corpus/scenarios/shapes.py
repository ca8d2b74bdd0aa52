"""Sizes that change, sizes zero and one, broadcasting, interpolation, and ragged tensors.

In: a probe. Out: gradients of the same program at several sizes in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("shapes",))
def batch_size_changes(p: Probe) -> None:
    """Four steps with batches of four sizes give four right gradients, with a hook in between."""
    model = p.module(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    for batch in (4, 7, 2, 5):
        hidden = model[1](model[0](p.randn(batch, 4)))
        hidden.register_hook(p.hook(f"hidden{batch}"))
        model.zero_grad()
        with p.backward():
            model[2](hidden).pow(2).mean().backward()
        p.value(f"grad{batch}", model[0].weight.grad)


@scenario(tags=("shapes",))
def batch_sizes_zero_and_one(p: Probe) -> None:
    """Batches of three, one, none and two: sizes 0 and 1 need no special treatment by the user."""
    model = p.module(nn.Linear(3, 2))
    for batch in (3, 1, 0, 2):
        x = p.leaf(f"x{batch}", p.randn(batch, 3, requires_grad=True))
        with p.backward():
            (model(x).exp() * x.sum(1, keepdim=True)).sum().backward()
        p.value(f"grad{batch}", model.weight.grad)


@scenario(tags=("shapes",))
def sequence_length_changes(p: Probe) -> None:
    """Attention over sequences of four lengths: two sizes change from step to step."""
    projection = p.module(nn.Linear(4, 12))
    for batch, length in ((2, 3), (2, 5), (3, 4), (1, 6)):
        q, k, v = projection(p.randn(batch, length, 4)).chunk(3, dim=-1)
        out = functional.scaled_dot_product_attention(q, k, v)
        with p.backward():
            out.pow(2).sum().backward()
        p.value(f"grad{batch}x{length}", projection.weight.grad)


@scenario(tags=("shapes",))
def reshape_with_sizes_of_the_input(p: Probe) -> None:
    """Code that reshapes by sizes it read from its input is differentiated for each of three inputs."""
    weight = p.leaf("weight", p.randn(6, requires_grad=True))
    for rows in (2, 3, 6):
        matrix = weight.view(rows, -1) * rows
        with p.backward():
            (matrix @ matrix.t()).diagonal().sum().backward()
        p.value(f"grad{rows}", weight.grad)


@scenario(tags=("shapes", "broadcast"))
def broadcast_operands(p: Probe) -> None:
    """Operands of different ranks and sizes get gradients that are summed back to their own shapes."""
    shapes: tuple[tuple[int, ...], ...] = ((), (3,), (2, 1), (4, 1, 3))
    leaves = [p.leaf(f"x{len(shape)}", p.randn(*shape, requires_grad=True)) for shape in shapes]
    out = leaves[0]
    for leaf in leaves[1:]:
        out = out * leaf + leaf.sin()
        out.register_hook(p.hook(f"out{out.dim()}"))
    with p.backward():
        out.pow(2).sum().backward()


@scenario(tags=("shapes", "broadcast"))
def expanded_gradient_is_summed_back(p: Probe) -> None:
    """An expanded tensor's gradient is summed back to its size."""
    x = p.leaf("x", p.randn(3, 1, requires_grad=True))
    wide = x.expand(3, 4)
    wide.register_hook(p.hook("wide"))
    with p.backward():
        (wide * p.randn(2, 3, 4)).sum().backward()


def _interpolate(p: Probe, mode: str) -> None:
    """Differentiate an interpolation by scale and by size."""
    image = p.leaf("image", p.rand(1, 2, 4, 5, requires_grad=True))
    larger = functional.interpolate(image, scale_factor=2.0, mode=mode)
    smaller = functional.interpolate(larger * image.mean(), size=(3, 3), mode=mode)
    larger.register_hook(p.hook("larger"))
    with p.backward():
        smaller.pow(2).sum().backward()


@scenario(tags=("shapes", "interpolate"), issue="pytorch#197092")
def interpolate_bilinear(p: Probe) -> None:
    """Bilinear interpolation, up and down."""
    _interpolate(p, "bilinear")


@scenario(tags=("shapes", "interpolate"), issue="pytorch#197092")
def interpolate_nearest(p: Probe) -> None:
    """Interpolation by the nearest element, up and down."""
    _interpolate(p, "nearest")


@scenario(tags=("shapes", "interpolate"), issue="pytorch#197092")
def interpolate_bicubic(p: Probe) -> None:
    """Bicubic interpolation, up and down."""
    _interpolate(p, "bicubic")


@scenario(tags=("shapes", "interpolate"), issue="pytorch#197092")
def interpolate_area(p: Probe) -> None:
    """Interpolation by the mean over areas, up and down."""
    _interpolate(p, "area")


@scenario(tags=("shapes", "nested"))
def jagged_nested_tensor(p: Probe) -> None:
    """A ragged batch as a jagged nested tensor: every component and the shared weight get a gradient."""
    parts = [p.leaf(f"part{n}", p.randn(n, 3, requires_grad=True)) for n in (2, 4, 1)]
    weight = p.leaf("weight", p.randn(3, 3, requires_grad=True))
    batch = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    with p.backward():
        (batch @ weight).sin().values().sum().backward()


@scenario(tags=("shapes", "data-dependent"))
def shapes_that_depend_on_values(p: Probe) -> None:
    """Selecting by a mask gives sizes that depend on values, in three steps with three different counts."""
    x = p.leaf("x", p.randn(8, requires_grad=True))
    for threshold in (-0.5, 0.0, 0.4):
        chosen: Tensor = x[x.detach() > threshold]
        chosen.register_hook(p.hook(f"chosen{threshold}"))
        with p.backward():
            (chosen.exp() * chosen).sum().backward()


@scenario(tags=("shapes", "convolution"))
def image_size_changes(p: Probe) -> None:
    """A convolution with batch normalisation and pooling over images of three sizes."""
    model = p.module(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)))
    for size in (5, 7, 6):
        with p.backward():
            model(p.randn(2, 1, size, size)).pow(2).sum().backward()
        p.value(f"grad{size}", model[0].weight.grad)
    p.value("running_mean", model[1].running_mean)


@scenario(tags=("shapes", "scalars"))
def numbers_that_change(p: Probe) -> None:
    """A loss scale, an exponent, a slope and a smoothing that change at each of five steps."""
    model = p.module(nn.Linear(4, 3))
    for step, number in enumerate((0.25, 0.5, 1.0, 0.0, 0.75)):
        model.zero_grad()
        logits = functional.leaky_relu(model(p.randn(5, 4)), number)
        target = torch.arange(5, device=logits.device) % 3
        loss = functional.cross_entropy(logits, target, label_smoothing=number)
        with p.backward():
            ((loss + (logits * logits + 1).pow(number + 1).mean()) * (number + 2)).backward()
        p.value(f"grad{step}", model.weight.grad)


@scenario(tags=("shapes", "hooks"))
def recurrence_of_changing_length(p: Probe) -> None:
    """A cell unrolled over sequences of four lengths: the graph itself changes, with a hook on each state."""
    cell = p.module(nn.RNNCell(2, 3))
    for length in (2, 4, 1, 3):
        state = p.randn(2, 3)
        for step in range(length):
            state = cell(p.randn(2, 2), state)
            state.register_hook(p.hook(f"length{length}_step{step}"))
        with p.backward():
            state.pow(2).sum().backward()


@scenario(tags=("shapes", "embedding"))
def vocabulary_that_grows(p: Probe) -> None:
    """The table of an embedding grows from step to step, and so does the gradient that is summed into it."""
    weight = p.leaf("weight", p.randn(3, 4, requires_grad=True))
    for words in (1, 2, 4):
        table = torch.cat([weight, p.randn(words, 4)])
        with p.backward():
            index = torch.tensor([0, 2, words, 2], device=weight.device)
            functional.embedding(index, table).sin().sum().backward()
        p.value(f"grad{words}", weight.grad)


@scenario(tags=("shapes", "in-place", "views"))
def slices_written_at_changing_sizes(p: Probe) -> None:
    """A row and a column of a clone are changed in place, for four numbers of rows."""
    weight = p.leaf("weight", p.randn(3, 3, requires_grad=True))
    for rows in (3, 5, 2, 4):
        hidden = (p.randn(rows, 3) @ weight).clone()
        hidden[1:, 0].mul_(weight[0, 0])
        hidden[-1].add_(weight.sum(0))
        hidden.register_hook(p.hook(f"rows{rows}"))
        with p.backward():
            (hidden * hidden).sum().backward()


@scenario(tags=("shapes", "broadcast"))
def expanded_to_changing_sizes(p: Probe) -> None:
    """One row is expanded to four numbers of rows, one and zero among them, and its gradient summed back."""
    row = p.leaf("row", p.randn(1, 3, requires_grad=True))
    for rows in (4, 1, 0, 6):
        wide = row.expand(rows, 3)
        with p.backward():
            (wide * p.randn(rows, 3)).sin().sum().backward()


@scenario(tags=("shapes", "layout", "low-precision"), fp64=False)
def half_precision_gradient_of_a_sum_with_channels_last(p: Probe) -> None:
    """The gradient of a sum, times channels last, in half precision: its formula's copy is not left out."""
    for sizes in ((1, 2, 2, 1), (2, 3, 4, 1), (1, 3, 4, 5)):
        scale = torch.randn(sizes[0], 1, 1, 1, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        weight = p.leaf(f"{sizes}", p.randn(*sizes).to(torch.bfloat16).requires_grad_())
        format_ = p.randn(*sizes).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        with p.backward():
            (torch._weight_norm(weight, scale) * format_).sum().backward()


@scenario(tags=("compiled", "shapes"), issue="pytorch#198119")
def pooling_with_windows_beyond_the_padding(p: Probe) -> None:
    """A window that `ceil_mode` lets stand beyond the padding is divided by as many elements as lie in it."""
    row = p.leaf("row", p.randn(1, 2, 8, requires_grad=True))
    image = p.leaf("image", p.randn(1, 2, 5, 6, requires_grad=True))
    volume = p.leaf("volume", p.randn(1, 2, 3, 5, 4, requires_grad=True))

    def pooled(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return (
            functional.avg_pool1d(x, 3, 3, ceil_mode=True),
            functional.avg_pool2d(y, 2, ceil_mode=True),
            functional.avg_pool2d(y, 3, 2, 1, ceil_mode=True),
            functional.avg_pool2d(y, (3, 2), (2, 3), (1, 0), ceil_mode=True, count_include_pad=False),
            functional.avg_pool2d(y, 2, ceil_mode=True, divisor_override=3),
            functional.avg_pool3d(z, 2, 3, 1, ceil_mode=True),
        )

    results = p.compile(pooled)(row, image, volume)
    with p.backward():
        torch.stack([one.square().sum() for one in results]).sum().backward()


@scenario(tags=("compiled", "layout"), issue="pytorch#197888")
def adaptive_pooling_of_volumes_with_channels_last(p: Probe) -> None:
    """The gradient of an adaptive maximum goes to its place, also if the volume has channels last."""
    images = p.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    volumes = p.randn(1, 2, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    given = p.leaf("images", images), p.leaf("volumes", volumes)

    def pooled(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (
            functional.adaptive_max_pool2d(x, (2, 3)),
            functional.adaptive_max_pool3d(y, (1, 2, 1)),
            functional.adaptive_max_pool3d(y, (2, 1, 2)),
            functional.max_pool3d(y, (2, 1, 2)),
        )

    results = p.compile(pooled)(*given)
    with p.backward():
        torch.stack([(one * one).sum() for one in results]).sum().backward()
