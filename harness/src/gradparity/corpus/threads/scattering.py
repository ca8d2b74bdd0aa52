"""Threads about scatters, indices at edges, expanded targets and strides.

In: a probe. Out: `SCENARIOS`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gradparity.corpus.scenario import collecting, scenario
from gradparity.probe import Probe

with collecting() as SCENARIOS:

    @scenario(issue="pytorch#193061")
    def t193061(p: Probe) -> None:
        """Eager gives every slice of one table that modulates two layer norms its own gradient."""
        table = p.leaf("table", p.randn(1, 4, 64, requires_grad=True))
        x = p.leaf("x", p.randn(2, 48, 64, requires_grad=True))

        def modulated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            shift, scale, shift2, scale2 = table.chunk(4, dim=1)
            h = F.layer_norm(x, (64,)) * (1 + scale) + shift
            return F.layer_norm(h, (64,)) * (1 + scale2) + shift2

        y = p.compile(modulated)(x, table)
        with p.backward():
            y.pow(2).mean().backward()

    @scenario(issue="pytorch#182012")
    def t182012(p: Probe) -> None:
        """Eager gives all places off the diagonal of diagonal_scatter a gradient of one under a sum."""
        x = p.leaf("x", p.randn(8, 8, requires_grad=True))
        source = p.leaf("source", p.randn(8, requires_grad=True))
        y = p.compile(lambda x, source: torch.diagonal_scatter(x, source, 0).sum())(x, source)
        with p.backward():
            y.backward()

    @scenario(issue="pytorch#180164")
    def t180164(p: Probe) -> None:
        """Eager's slice_scatter reads an expanded gradient as the full tensor that it stands for."""
        x = p.leaf("x", p.randn(4, 13, 33, requires_grad=True))
        part = p.leaf("part", p.randn(4, 5, 33, requires_grad=True))

        def scattered(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            return torch.slice_scatter(x, part, dim=1, start=2, end=7).sum(dim=1)

        y = p.compile(scattered)(x, part)
        with p.backward():
            y.sum().backward()

    @scenario(issue="pytorch#183986")
    def t183986(p: Probe) -> None:
        """Eager's functional index operators give an expanded tensor rows of its own before they write."""
        x = p.randn(3, 8)
        places = torch.tensor([0, 2, 0], device=p.device)

        def indexed(x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
            base = torch.zeros(1, 8, device=x.device, dtype=x.dtype).expand(4, -1)
            added = base.index_add(0, places, x)
            put = base.index_put((places,), x, accumulate=True)
            return added, put, base.index_fill(0, places, 2.0), base.index_copy(0, places[:1], x[:1])

        for place, result in enumerate(p.compile(indexed)(x, places)):
            p.value(f"result {place}", result)

    @scenario(issue="pytorch#191571")
    def t191571(p: Probe) -> None:
        """Eager reads a scatter into a dimension of size one after all of it is written."""
        x = p.leaf("x", p.randn(8, 4, requires_grad=True))
        places = torch.zeros(8, dtype=torch.int64, device=p.device)

        def gathered(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            sums = torch.zeros(1, x.shape[1], device=x.device, dtype=x.dtype)
            sums = sums.scatter_add(0, places.unsqueeze(-1).expand(-1, x.shape[1]), x)
            return torch.index_select(sums, 0, places)

        y = p.compile(gathered)(x, places)
        p.value("gathered", y)
        with p.backward():
            y.sin().sum().backward()

    @scenario(issue="pytorch#198094")
    def t198094(p: Probe) -> None:
        """Eager's slice_scatter is a new tensor, which zeroing the input afterwards leaves alone."""
        x = p.watch("x", torch.arange(24, device=p.device).reshape(4, 6))
        source = torch.arange(-12, 12, device=p.device).reshape(4, 6)

        def scattered(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            y = torch.slice_scatter(x, source[1:3], dim=0, start=1, end=3)
            x.zero_()
            return y

        p.value("scattered", p.compile(scattered)(x, source))

    @scenario(issue="pytorch#186850")
    def t186850(p: Probe) -> None:
        """Eager reads the result of a custom operator by the strides that it really has."""
        x = p.randn(1, 4, 3, 2, 2)
        y = p.compile(lambda x: strided_copy(x).unsqueeze(2).expand(-1, -1, 2, -1, -1, -1) + x.unsqueeze(2))(
            x
        )
        p.value("sum", y)


@torch.library.custom_op("gradparity_threads::strided_copy", mutates_args=())
def strided_copy(x: torch.Tensor) -> torch.Tensor:
    """A copy in which the third dimension is the innermost."""
    out = _innermost_third(x)
    return out.copy_(x)


@strided_copy.register_fake
def _innermost_third(x: torch.Tensor) -> torch.Tensor:
    b, c, t, h, w = x.shape
    strides = (c * t * h * w, t, 1, c * t * w, c * t)
    return torch.empty_strided((b, c, t, h, w), strides, dtype=x.dtype, device=x.device)
