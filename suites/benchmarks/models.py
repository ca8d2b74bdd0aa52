"""The programs that the benchmarks differentiate: built from a seed, no downloads.

In: a name of `WORKLOADS` (or of `real_models.MODELS`) and a device. Out: a Workload, whose `loss()` runs a
forward and returns the scalar that `.backward()` is called on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from .real_models import MODELS


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer encoder and of its input."""

    layers: int
    width: int
    heads: int
    batch: int
    sequence: int
    dtype: torch.dtype = torch.float32

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        """The model and its input."""
        layers = [
            nn.TransformerEncoderLayer(self.width, self.heads, 4 * self.width, dropout=0.0, batch_first=True)
            for _ in range(self.layers)
        ]
        inputs = torch.randn(self.batch, self.sequence, self.width)
        return nn.Sequential(*layers).to(self.dtype), inputs.to(self.dtype)


@dataclass(frozen=True)
class Mlp:
    """The sizes of `layers` times Linear, LayerNorm and SiLU, and of their input."""

    layers: int
    width: int
    batch: int

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        """The model and its input."""
        layers = [
            layer
            for _ in range(self.layers)
            for layer in (nn.Linear(self.width, self.width), nn.LayerNorm(self.width), nn.SiLU())
        ]
        return nn.Sequential(*layers), torch.randn(self.batch, self.width)


@dataclass(frozen=True)
class Chain:
    """`calls` elementwise operators on one element, every third of them with a parameter of its own."""

    calls: int

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        """The model and its input."""
        return _Chain(self.calls), torch.ones(1)


class _Chain(nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range((calls + 2) // 3))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call in range(self.calls):
            x = x * self.factors[call // 3] if call % 3 == 0 else x.sin() if call % 3 == 1 else x.tanh()
        return x


#: `small` is for compile time and overhead: little arithmetic, the graph of the real thing. `wide` has
#: activations of hundreds of MiB, so that its peak memory says something. `deep` has the graph of a large
#: model, as the transformers named for their layers have; these are of a real size on a GPU. The `mlp`s are
#: all host time when small, and none when large; `chain` is the host's time of a node call and nothing else.
WORKLOADS: Mapping[str, Shape | Mlp | Chain] = {
    "deep": Shape(layers=12, width=64, heads=4, batch=4, sequence=16),
    "small": Shape(layers=4, width=64, heads=4, batch=8, sequence=32),
    "wide": Shape(layers=4, width=64, heads=4, batch=32, sequence=512),
    "tiny": Shape(layers=1, width=8, heads=1, batch=1, sequence=4),
    "transformer4": Shape(layers=4, width=64, heads=4, batch=8, sequence=32),
    "transformer12": Shape(layers=12, width=64, heads=4, batch=8, sequence=32),
    "transformer48": Shape(layers=48, width=64, heads=4, batch=8, sequence=32),
    "mlp40-narrow": Mlp(layers=40, width=8, batch=4),
    "mlp40": Mlp(layers=40, width=256, batch=64),
    "mlp40-large": Mlp(layers=40, width=512, batch=256),
    "chain": Chain(calls=300),
}


def _of_real_size(layers: int) -> Shape:
    return Shape(layers, width=768, heads=12, batch=8, sequence=512, dtype=torch.bfloat16)


#: what has another size on a GPU.
ON_CUDA: Mapping[str, Shape | Mlp] = {
    "transformer4": _of_real_size(4),
    "transformer12": _of_real_size(12),
    "transformer48": _of_real_size(48),
    "mlp40-large": Mlp(layers=40, width=2048, batch=1024),
}


def mean_square(outputs: torch.Tensor) -> torch.Tensor:
    """A scalar that hangs from every element."""
    return outputs.square().mean()


def as_it_is(loss: torch.Tensor) -> torch.Tensor:
    """The objective of a model that returns its loss."""
    return loss


@dataclass(frozen=True)
class Workload:
    """A model with its input."""

    model: nn.Module
    inputs: torch.Tensor
    objective: Callable[[torch.Tensor], torch.Tensor] = mean_square

    def loss(self) -> torch.Tensor:
        """Run the forward in eager mode and return a scalar."""
        return self.objective(self.model(self.inputs))

    def clear(self) -> None:
        """Set every `.grad` to None, so that the next backward accumulates into nothing."""
        self.model.zero_grad(set_to_none=True)

    def twin(self) -> Workload:
        """The same with a copy of the model."""
        return replace(self, model=copy.deepcopy(self.model))


def workload(name: str, device: str = "cpu") -> Workload:
    """Build the program called `name`, always with the same weights and input.

    Raises: ImportError where what it is made of is not installed.
    """
    torch.manual_seed(0)
    if name in MODELS:
        model, inputs = MODELS[name].build(device)
        return Workload(model.to(device), inputs.to(device), as_it_is)
    model, inputs = (ON_CUDA.get(name, WORKLOADS[name]) if device == "cuda" else WORKLOADS[name]).build()
    return Workload(model.to(device), inputs.to(device))
