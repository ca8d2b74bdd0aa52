"""Sizes and numbers that change from step to step, with hooks between the parts of the graph.

In: a probe. Out: hook timelines and gradients of one program at many sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.watch import watch_parameters
from gradparity.probe import Probe


@scenario(tags=("steps", "shapes", "hooks"))
def batch_and_length_change_together(p: Probe) -> None:
    """Both dimensions of a batch of sequences change, together and alone, one of them down to one."""
    model = p.module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    watch_parameters(p, model)
    for batch, length in ((2, 4), (3, 4), (3, 5), (4, 6), (1, 6), (4, 1), (2, 4)):
        hidden = model[1](model[0](p.randn(batch, length, 3)))
        hidden.register_hook(p.hook("hidden"))
        with p.backward():
            model[2](hidden).logsumexp(1).mean().backward()
    p.value("grad", model[0].weight.grad)


@scenario(tags=("steps", "shapes", "hooks"))
def attention_over_growing_sequences(p: Probe) -> None:
    """Causal attention over sequences that grow by one, whose scores are quadratic in the length."""
    weight = p.leaf("weight", p.randn(4, 12, requires_grad=True))
    for length in (2, 3, 4, 5):
        q, k, v = (p.randn(2, length, 4) @ weight).chunk(3, dim=-1)
        mask = torch.full((length, length), float("-inf"), device=p.device, dtype=p.dtype).triu(1)
        scores = q @ k.transpose(1, 2) / 2 + mask
        scores.register_hook(p.hook(f"scores{length}"))
        with p.backward():
            (scores.softmax(-1) @ v).pow(2).mean().backward()
        p.value(f"grad{length}", weight.grad)


@scenario(tags=("steps", "shapes", "hooks"))
def empty_and_single_batches_with_hooks(p: Probe) -> None:
    """Hooks see gradients of sizes 3, 0, 1, 0 and 4 in the first dimension."""
    weight = p.leaf("weight", p.randn(3, 2, requires_grad=True))
    for batch in (3, 0, 1, 0, 4):
        hidden = (p.randn(batch, 3) @ weight).sigmoid()
        hidden.register_hook(p.hook(f"hidden{batch}", lambda grad: grad * 2))
        with p.backward():
            (hidden * hidden.sum(1, keepdim=True)).sum().backward()
    p.value("grad", weight.grad)


@scenario(tags=("steps", "hooks"))
def loss_scale_that_changes(p: Probe) -> None:
    """A Python number scales the loss, another one in each of eight steps, and a hook divides by it."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    for step in range(8):
        scale = 2.0**step + step
        h = x.sin() * 3
        h.register_hook(p.hook("h", lambda grad, scale=scale: grad / scale))
        with p.backward():
            (h.exp().mean() * scale).backward()
    p.value("grad", x.grad)


@scenario(tags=("steps", "hooks"))
def loss_scale_as_a_tensor(p: Probe) -> None:
    """The scale is a tensor without gradient, one value after the other."""
    model = p.module(nn.Linear(3, 2))
    watch_parameters(p, model)
    for scale in (1.0, 1024.0, 0.5, 3.0):
        with p.backward():
            (model(p.randn(4, 3)).pow(2).mean() * p.tensor(scale)).backward()
        model.weight.grad.div_(scale)


@scenario(tags=("steps", "shapes", "hooks"))
def images_of_several_sizes(p: Probe) -> None:
    """Convolution, pooling and interpolation on images whose height and width change."""
    model = p.module(
        nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    )
    watch_parameters(p, model)
    for height, width in ((6, 6), (8, 6), (5, 9), (4, 4)):
        out = model(p.randn(2, 1, height, width))
        out.register_hook(p.hook("pooled"))
        with p.backward():
            functional.interpolate(out, scale_factor=2).pow(2).sum().backward()
    p.value("grad", model[0].weight.grad)


@scenario(tags=("steps", "shapes", "hooks"))
def number_of_pieces_changes(p: Probe) -> None:
    """As many pieces are concatenated as the step says: the graph itself changes with the number."""
    x = p.leaf("x", p.randn(6, requires_grad=True))
    for count in (1, 2, 3, 6, 2):
        pieces = [piece.sin() * (i + 1) for i, piece in enumerate(x.chunk(count))]
        pieces[-1].register_hook(p.hook(f"last of {count}"))
        with p.backward():
            torch.cat(pieces[::-1]).cumsum(0).pow(2).sum().backward()
        p.value(f"grad{count}", x.grad)


@scenario(tags=("steps", "shapes", "hooks"))
def lookups_of_several_lengths(p: Probe) -> None:
    """An embedding is looked up for bags of tokens of other lengths and offsets in every step."""
    table = p.leaf("table", p.randn(8, 3, requires_grad=True))
    table.register_post_accumulate_grad_hook(p.hook("table", kind="post_acc"))
    for lengths in ((2, 3), (1, 1, 4), (5,), (1, 2)):
        tokens = p.randint(8, sum(lengths))
        offsets = torch.tensor([0, *lengths[:-1]], device=p.device).cumsum(0)
        bags = functional.embedding_bag(tokens, table, offsets, mode="mean")
        with p.backward():
            (bags.pow(2).sum() + table[tokens].prod(1).sum()).backward()


@scenario(tags=("steps", "shapes", "views"))
def slices_that_move(p: Probe) -> None:
    """A window of another place and width is cut from the same tensor and scaled in place."""
    base = p.leaf("base", p.randn(5, 4, requires_grad=True))
    for start, width, turned in ((0, 2, False), (1, 3, False), (2, 3, True), (4, 1, True), (3, 0, False)):
        work = base.sin()
        window = work[start : start + width]
        window.mul_(2 + start)
        with p.backward():
            ((work.t() if turned else work).exp().sum() + window.sum()).backward()
        p.value(f"grad{start}", base.grad)


@scenario(tags=("steps", "shapes", "hooks"))
def last_batch_is_smaller(p: Probe) -> None:
    """Two epochs of three batches, of which the last is smaller, with a step of the optimizer after each."""
    model = p.module(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)))
    watch_parameters(p, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    data, labels = p.randn(10, 3), p.randint(2, 4)
    for _ in range(2):
        for batch in data.split(4):
            optimizer.zero_grad()
            with p.backward():
                functional.cross_entropy(model(batch), labels[: len(batch)]).backward()
            optimizer.step()
    p.value("weight", model[0].weight.detach())


@scenario(tags=("steps", "shapes", "saved"))
def sizes_change_under_saved_tensor_hooks(p: Probe) -> None:
    """Saved tensors are packed as half their bytes and unpacked, for another size in every step."""
    weight = p.leaf("weight", p.rand(3, 3, requires_grad=True))

    def unpack(packed: tuple[torch.Tensor, torch.dtype]) -> torch.Tensor:
        p.event("unpack", tuple(packed[0].shape))
        return packed[0].to(packed[1])

    for batch in (2, 4, 1, 3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.bfloat16(), t.dtype), unpack):
            out = (p.rand(batch, 3) @ weight).exp()
        with p.backward():
            out.sum().backward()
        p.value(f"grad{batch}", weight.grad)


PIECES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of one": lambda t: t.split(1)[1],
    "of two": lambda t: t.split(2)[0],
    "the last of two": lambda t: t.split(2)[-1],
    "along the second dimension": lambda t: t.split(2, 1)[1],
    "unsafe": lambda t: torch.unsafe_split(t, 1)[1],
    "copied": lambda t: torch.split_copy(t, 1)[1],  # type: ignore[func-returns-value]
    "chunks": lambda t: t.chunk(5)[0],
    "parts": lambda t: t.tensor_split(2)[1],
    "of given sizes": lambda t: t.split([1] * t.shape[0])[1],
    "rows": lambda t: t.unbind(0)[1],
    "the last row": lambda t: t.unbind(0)[-1],
    "columns": lambda t: t.unbind(1)[1],
    "copied rows": lambda t: torch.unbind_copy(t, 0)[1],  # type: ignore[func-returns-value]
}


@scenario(tags=("steps", "shapes", "hooks"))
def the_number_of_pieces_changes(p: Probe) -> None:
    """The same piece of a tensor is used, of which there are more, and fewer, pieces in other steps."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for name, piece in PIECES.items():
        for size in (5, 3, 7, 4):
            table = x.sum() * p.randn(size, size)
            table.register_hook(p.hook(f"{name} of {size}"))
            with p.backward():
                piece(table).sin().sum().backward()


class Rows(torch.autograd.Function):
    """Its own unbind, with one output a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(row.clone() for row in x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.stack([grad * (1 + i) for i, grad in enumerate(grads)])


@scenario(tags=("steps", "shapes", "functions"))
def the_number_of_outputs_of_a_function_changes(p: Probe) -> None:
    """A Function of as many outputs as its input has rows, of which always the second is used."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for size in (5, 3, 7, 4, 2):
        table = x.sum() * p.randn(size, size)
        table.register_hook(p.hook(f"table of {size}"))
        with p.backward():
            Rows.apply(table)[1].sin().sum().backward()
