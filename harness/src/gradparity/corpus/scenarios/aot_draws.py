"""Random numbers drawn into tensors of every layout, inside functions compiled ahead.

In: a probe, whose `compile` is the identity for eager. Out: the numbers, gradients, and what is drawn next.
One scenario for each way of drawing and each layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "random", "layout")

#: made of a contiguous tensor of the sizes 4, 6, 8, 10; what a kernel does depends on how it lies.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "stepped": lambda x: x[:, ::2, :, 1::3],
    "expanded": lambda x: x[:, :1].expand(4, 6, 8, 10),
    "sizeless": lambda x: x[:, :0],
}

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.3, True),
    "channel_dropout": lambda x: functional.dropout2d(x, 0.3),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x, dim=1) if x.shape[1] else x * 1,
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "poisson": lambda x: x * torch.poisson(x.detach().exp()),
    "poisson_alone": lambda x: torch.poisson(x.exp()),
    "gamma": lambda x: torch._standard_gamma(x.exp()),
    "bernoulli_in_place": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "uniform_in_place": lambda x: x * torch.empty_like(x).uniform_(),
    "normal_in_place": lambda x: x * torch.empty_like(x).normal_(),
    "exponential_in_place": lambda x: x * torch.empty_like(x).exponential_(),
    "noise_of_the_same_strides": lambda x: x * (x.detach() * 1).mT.normal_(1.0, 2.0).mT,
    "noise_into_a_view": lambda x: x * torch.zeros(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].uniform_(),
    "like_functions": lambda x: x * torch.rand_like(x) + torch.randn_like(x),
}  # fmt: skip


def _register(draw: str, layout: str) -> None:
    def body(p: Probe) -> None:
        x = p.leaf("x", p.randn(4, 6, 8, 10, requires_grad=True))
        call = p.compile(lambda a: DRAWS[draw](LAYOUTS[layout](a.sin())))
        for step in range(2):
            out = call(x)
            p.value(f"out{step}", out.detach())
            p.value(f"next{step}", torch.rand(2))
            with p.backward():
                out.sum().backward()

    body.__name__ = f"aot_draw_{draw}_{layout}"
    body.__doc__ = f"A {draw} of a tensor that is {layout} draws the numbers that eager draws, in its order."
    scenario(tags=TAGS, fp64=False)(body)


for _draw in DRAWS:
    for _layout in LAYOUTS:
        _register(_draw, _layout)
