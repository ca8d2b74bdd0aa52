"""The programs that the benchmarks differentiate: built from a seed, no downloads, eager forward.

In: a name of `WORKLOADS` and a device. Out: a Workload, whose `loss()` runs a forward and returns the scalar
that `.backward()` is called on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer and of its input."""

    layers: int
    width: int
    heads: int
    batch: int
    sequence: int


#: `small` is for compile time and overhead: little arithmetic, the graph of the real thing. `wide` has
#: activations of hundreds of MiB, so that its peak memory says something. `deep` has the graph of a large
#: model.
WORKLOADS = {
    "deep": Shape(layers=12, width=64, heads=4, batch=4, sequence=16),
    "small": Shape(layers=4, width=64, heads=4, batch=8, sequence=32),
    "wide": Shape(layers=4, width=64, heads=4, batch=32, sequence=512),
}


@dataclass(frozen=True)
class Workload:
    """A model with its input."""

    model: nn.Module
    inputs: torch.Tensor

    def loss(self) -> torch.Tensor:
        """Run the forward in eager mode and return a scalar."""
        return self.model(self.inputs).square().mean()

    def clear(self) -> None:
        """Set every `.grad` to None, so that the next backward accumulates into nothing."""
        self.model.zero_grad(set_to_none=True)


def workload(name: str, device: str = "cpu") -> Workload:
    """Build the transformer encoder called `name`, always with the same weights and input."""
    shape = WORKLOADS[name]
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(shape.width, shape.heads, 4 * shape.width, dropout=0.0, batch_first=True)
        for _ in range(shape.layers)
    ]
    inputs = torch.randn(shape.batch, shape.sequence, shape.width)
    return Workload(nn.Sequential(*layers).to(device), inputs.to(device))
