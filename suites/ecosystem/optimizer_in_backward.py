"""A recipe in the way of torchtune: checkpointed layers, chunked loss, an optimizer in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import retrograd

VOCABULARY, CHUNKS = 256, 4


class Decoder(nn.Module):
    """Causal layers between an embedding and an output that shares its weight."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Scores of the next token, in chunks of the sequence."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], tokens.device, self.embedding.weight.dtype
        )
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, mask, use_reentrant=False)
        return [part @ self.embedding.weight.T for part in self.norm(hidden).chunk(CHUNKS, 1)]


def train(
    prepare: Callable[[Any], Any] = lambda model: model,
    device: str = "cpu",
    width: int = 32,
    layers: int = 2,
    batch: int = 2,
    steps: int = 4,
) -> nn.Module:
    """Train a new model; `prepare` may compile it. Returns the model, without what `prepare` made of it."""
    torch.manual_seed(0)
    plain = Decoder(width, layers).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    model = prepare(plain)
    optimizers = {one: torch.optim.AdamW([one], lr=1e-3) for one in plain.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in plain.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    data = torch.randint(VOCABULARY, (4, batch, 2 * width + 1), device=device)
    for number in range(steps):
        tokens = data[number % 4]
        scores, targets = model(tokens[:, :-1]), tokens[:, 1:].chunk(CHUNKS, 1)
        losses = [
            nn.functional.cross_entropy(one.float().flatten(0, 1), target.flatten())
            for one, target in zip(scores, targets, strict=True)
        ]
        torch.stack(losses).mean().backward()
    return plain


if __name__ == "__main__":
    with retrograd.compiled_autograd() as compiled:
        train()
    print(compiled.explain())
