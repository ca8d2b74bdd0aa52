"""Opacus: differentially private training; hooks of each layer compute the gradient of each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import retrograd


def train(
    prepare: Callable[[Any], Any] = lambda model: model,
    device: str = "cpu",
    width: int = 32,
    layers: int = 2,
    batch: int = 8,
    steps: int = 4,
) -> nn.Module:
    """Train a new model; `prepare` may compile it. Returns the model, without what `prepare` made of it."""
    torch.manual_seed(0)
    hidden = [
        layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh())
    ]
    plain = nn.Sequential(*hidden, nn.Linear(width, 10)).to(device)
    rows = TensorDataset(torch.randn(8 * batch, width), torch.randint(10, (8 * batch,)))
    private, optimizer, loader = PrivacyEngine().make_private(
        module=plain,
        optimizer=torch.optim.AdamW(plain.parameters()),
        data_loader=DataLoader(rows, batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    model, done = prepare(private), 0
    while done < steps:
        for x, y in loader:
            if done == steps:
                break
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            done += 1
    return plain


if __name__ == "__main__":
    with retrograd.compiled_autograd() as compiled:
        train()
    print(compiled.explain())
