"""Cotangents of every layout, at functions whose formulas look at how a gradient lies in memory.

In: a probe, whose `compile` is the identity for eager. Out: gradients and their strides. One scenario for
each formula and each layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "layout", "cotangent")

#: made of an output and random numbers of its shape.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda g: g.flatten()[0].expand(g.shape),
    "partly_expanded": lambda g: g[:1].expand(g.shape),
    "transposed": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1),
    "rows_last": lambda g: g.movedim(0, -1).contiguous().movedim(-1, 0),
    "stepped": lambda g: torch.stack([g, g], -1)[..., 0],
    "offset": lambda g: torch.cat([g, g])[g.shape[0] :],
    "conjugated": lambda g: g.conj().resolve_conj().conj() if g.is_complex() else torch.view_as_complex(
        torch.stack([g, -g], -1)
    ).conj().imag,
}  # fmt: skip

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": lambda x: functional.group_norm(x, 2),
    "norm_beside_its_input": lambda x: torch.fmax(
        x.half().to(x.dtype), functional.group_norm(x.half().to(x.dtype), 1)
    ),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[1:]),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "weight_norm": lambda x: torch._weight_norm(x, x[:, :1, :1, :1] * 2, 0),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(2, 4, 6, 4, 2)) * 2j),
    "complex": lambda x: torch.view_as_complex(x.reshape(2, 4, 6, 4, 2)).sin(),
    "pooling": lambda x: functional.max_pool2d(x, 2),
    "interpolation": lambda x: functional.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "product": lambda x: x.sin() * x,
    "view": lambda x: x.exp().reshape(8, -1).t(),
    "copy": lambda x: (x * 2).contiguous(),
    "convolution": lambda x: functional.conv2d(x, x[:, :, :3, :3]),
    "softmax": lambda x: x.softmax(1),
    "cumulated": lambda x: x.cumsum(2).cumprod(1),
    "indexed": lambda x: x[:, [0, 2, 2]],
    "fourier": lambda x: torch.fft.rfft2(x),
    "two_outputs_meet": lambda x: torch.cat([x.sin(), x.cos()], 1).unfold(1, 3, 2),
}


def _register(formula: str, layout: str) -> None:
    def body(p: Probe) -> None:
        x = p.leaf("x", p.randn(2, 4, 6, 8, requires_grad=True))
        call = p.compile(FORMULAS[formula])
        for step in range(3):
            out = call(x)
            numbers = p.randn(*out.shape, dtype="complex64" if out.is_complex() else "float32")
            with p.backward():
                out.backward(LAYOUTS[layout](numbers) if step else numbers)
            p.value(f"grad{step}", x.grad)
            x.grad = None

    body.__name__ = f"aot_cotangent_{layout}_of_{formula}"
    body.__doc__ = f"A gradient that is {layout} arrives at a {formula}, after one that is not."
    scenario(tags=TAGS)(body)


for _formula in FORMULAS:
    for _layout in LAYOUTS:
        _register(_formula, _layout)


TOGETHER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copysign": torch.copysign,
    "fmax": torch.fmax,
    "floor_division": lambda x, y: torch.floor_divide(x.detach(), y.detach()),
    "division_and_rounding": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "exponent": torch.ldexp,
    "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
    "logical": lambda x, y: torch.logical_xor(x > 1, y > 1),
}
#: of two operands of a function that goes over their elements together.
OPERANDS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "rows_below_a_turned": lambda x: (x.permute(2, 1, 0), x[0, :, 0, None].expand(-1, 2) + 1),
    "columns_turned": lambda x: (x[:, :1] + 1, x[0].t().contiguous().t()),
    "a_number": lambda x: (x.permute(2, 1, 0), x[0, 0, 0] + 1),
}


@scenario(tags=TAGS)
def aot_results_of_operands_that_lie_otherwise(p: Probe) -> None:
    """A result lies as its operands do, the first foremost; who reads its memory in order sees that."""
    x = p.leaf("x", (p.randn(2, 3, 4).abs() + 0.5).requires_grad_())

    def program(x: Tensor) -> list[Tensor]:
        return [call(*make(x)) for call in TOGETHER.values() for make in OPERANDS.values()]

    for number, result in enumerate(p.compile(program)(x)):
        p.value(f"result {number}", result)
        p.value(f"memory {number}", result.detach().as_strided((result.numel(),), (1,)))
        if result.requires_grad:
            (grad,) = torch.autograd.grad(result, x, torch.ones_like(result), retain_graph=True)
            p.value(f"gradient {number}", grad)
