"""A potential with forces, trained as MACE is: spherical harmonics, a loss of energies and forces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from e3nn import o3, set_optimization_defaults
from torch import nn

import retrograd

# The default is TorchScript, whose functions no compiled backward can contain.
set_optimization_defaults(jit_mode="eager")
HARMONICS = "0e + 1o + 2e"


class Potential(nn.Module):
    """The energy of atoms, all of which are neighbours."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        features = o3.Irreps(f"{width}x0e + {width // 2}x1o")
        self.first = nn.Parameter(torch.randn(width))
        self.register_buffer("rest", torch.zeros(features.dim - width))
        self.harmonics = o3.SphericalHarmonics(HARMONICS, normalize=True)
        self.products = nn.ModuleList()
        self.radial = nn.ModuleList()
        for _ in range(layers):
            product = o3.FullyConnectedTensorProduct(features, HARMONICS, features, shared_weights=False)
            self.products.append(product)
            self.radial.append(
                nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, product.weight_numel))
            )
        self.readout = o3.Linear(features, "1x0e")

    def forward(self, positions: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """The energy of positions (atoms, 3), with edges (2, edges)."""
        source, target = edges
        vectors = positions[target] - positions[source]
        lengths = vectors.norm(dim=1, keepdim=True)
        centres = torch.linspace(0, 3, 8, device=positions.device)
        near = torch.exp(-((lengths - centres) ** 2))
        harmonics = self.harmonics(vectors)
        hidden = torch.cat([self.first, self.rest]).expand(len(positions), -1)
        for product, radial in zip(self.products, self.radial, strict=True):
            messages = product(hidden[source], harmonics, radial(near))
            hidden = hidden + torch.zeros_like(hidden).index_add(0, target, messages) / len(positions)
        return self.readout(hidden).sum()


def train(
    prepare: Callable[[Any], Any] = lambda model: model,
    device: str = "cpu",
    width: int = 4,
    layers: int = 2,
    batch: int = 6,
    steps: int = 4,
) -> nn.Module:
    """Train a new model on `batch` atoms; `prepare` may compile it. Returns the model as it was made."""
    torch.manual_seed(0)
    plain = Potential(width, layers).to(device)
    model = prepare(plain)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    edges = torch.combinations(torch.arange(batch)).T
    edges = torch.cat([edges, edges.flip(0)], 1).to(device)
    places = torch.randn(4, batch, 3, device=device)
    wanted = torch.randn(4, batch, 3, device=device)
    for number in range(steps):
        positions = places[number % 4].clone().requires_grad_()
        energy = model(positions, edges)
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        loss = energy.square() + (slope + wanted[number % 4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return plain


if __name__ == "__main__":
    with retrograd.compiled_autograd() as compiled:
        train()
    print(compiled.explain())
