"""accelerate: a convolutional network, accumulated over two batches, with clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import retrograd


def network(width: int, layers: int) -> nn.Sequential:
    """A classifier of images with three channels."""
    blocks = [
        layer
        for _ in range(layers)
        for layer in (nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.GELU())
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(width, 10))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *head)


def train(
    prepare: Callable[[Any], Any] = lambda model: model,
    device: str = "cpu",
    width: int = 16,
    layers: int = 2,
    batch: int = 4,
    steps: int = 4,
) -> nn.Module:
    """Train a new model; `prepare` may compile it. Returns the model, without what `prepare` made of it."""
    torch.manual_seed(0)
    precision = "bf16" if device == "cuda" else "no"
    accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=2, mixed_precision=precision)
    plain = network(width, layers)
    optimizer = torch.optim.AdamW(plain.parameters())
    model, optimizer = accelerator.prepare(prepare(plain.to(accelerator.device)), optimizer)
    images = torch.randn(4, batch, 3, 2 * width, 2 * width, device=accelerator.device)
    labels = torch.randint(10, (4, batch), device=accelerator.device)
    for number in range(2 * steps):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images[number % 4]), labels[number % 4])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return plain


if __name__ == "__main__":
    with retrograd.compiled_autograd() as compiled:
        train()
    print(compiled.explain())
