"""Lightning: an encoder of sequences under its Trainer, with clipping and accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import retrograd


class Classifier(lightning.LightningModule):
    """Encoder layers, their mean over the sequence, and a linear layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """The loss of a batch."""
        sequences, labels = batch
        return nn.functional.cross_entropy(self.head(self.encoder(sequences).mean(1)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer for all parameters."""
        return torch.optim.AdamW(self.parameters())


def train(
    prepare: Callable[[Any], Any] = lambda model: model,
    device: str = "cpu",
    width: int = 32,
    layers: int = 2,
    batch: int = 4,
    steps: int = 4,
) -> nn.Module:
    """Train a new module; `prepare` may compile it. Returns the module, without what `prepare` made of it."""
    torch.manual_seed(0)
    module = Classifier(width, layers)
    rows = TensorDataset(torch.randn(16 * batch, 2 * width, width), torch.randint(10, (16 * batch,)))
    trainer = lightning.Trainer(
        accelerator=device,
        devices=1,
        precision="bf16-mixed" if device == "cuda" else "32-true",
        max_epochs=-1,
        max_steps=steps,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(prepare(module), DataLoader(rows, batch_size=batch))
    return module


if __name__ == "__main__":
    with retrograd.compiled_autograd() as compiled:
        train()
    print(compiled.explain())
