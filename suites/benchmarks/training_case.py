"""What a row of the zoo of speed is made of, and how language models and image classifiers become rows.

In: a device and functions that build a model. Out: a model, three batches, and the loss of a batch. On a GPU
models have published sizes and run under autocast to bfloat16, as trainers run them; on a CPU they are small,
with the operators of the real thing, in float32.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCHES = 3
Loss = Callable[[Callable[..., Any], Any], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """How large a model is on a device."""

    device: str

    @property
    def is_real(self) -> bool:
        """Whether it has its published size."""
        return self.device == "cuda"

    def pick(self, real: Any, small: Any) -> Any:
        """The one that belongs to this size."""
        return real if self.is_real else small

    def batches(self, make: Callable[[], Any]) -> list[Any]:
        """Three batches on the device, each made by `make` on the CPU."""
        return [_to(self.device, make()) for _ in range(BATCHES)]


def _to(device: str, batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: value.to(device) for key, value in batch.items()}
    return tuple([value.to(device) for value in batch])


@dataclass(frozen=True)
class Trained:
    """What is trained: a model, batches that are used in turn, and the loss of the model on one of them."""

    model: nn.Module
    batches: list[Any]
    loss: Loss
    half: bool = True

    def precision(self, device: str) -> AbstractContextManager[Any]:
        """The context of forward and loss."""
        if device == "cuda" and self.half:
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()


@dataclass(frozen=True)
class TrainedModel:
    """A row of the zoo: the package that it needs, and how it is built."""

    package: str
    build: Callable[[Size], Trained]

    @property
    def is_here(self) -> bool:
        """Whether its package is installed."""
        return importlib.util.find_spec(self.package) is not None


def own_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that a model of transformers computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def language(config: str, model: str, sizes: Callable[[Size], dict[str, Any]]) -> TrainedModel:
    """A language model of transformers that predicts its own tokens: 8 x 512 of them, or 2 x 32."""

    def build(size: Size) -> Trained:
        library = importlib.import_module("transformers")
        given = sizes(size) | {"use_cache": False}
        made = getattr(library, model)(getattr(library, config)(**given))
        count, shape = made.config.vocab_size, size.pick((8, 512), (2, 32))

        def batch() -> dict[str, torch.Tensor]:
            tokens = torch.randint(3, count, shape)
            return {"input_ids": tokens, "labels": tokens.clone()}

        return Trained(made, size.batches(batch), own_loss)

    return TrainedModel("transformers", build)


def gpt2(size: Size) -> dict[str, Any]:
    """The configuration of GPT-2."""
    small = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    return {} if size.is_real else {**small, "bos_token_id": None, "eos_token_id": None}


def images(package: str, make: Callable[[Size], nn.Module], real: int = 64) -> TrainedModel:
    """An image classifier on batches of `real` images of 224 x 224, or of 2 of 32 x 32."""

    def build(size: Size) -> Trained:
        shape = size.pick((real, 3, 224, 224), (2, 3, 32, 32))
        model = make(size)

        def batch() -> tuple[torch.Tensor, torch.Tensor]:
            images = torch.randn(shape).to(memory_format=torch.channels_last)
            return images, torch.randint(10, shape[:1])

        return Trained(model, size.batches(batch), _classify)

    return TrainedModel(package, build)


def _classify(model: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


SMALL = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128,
}  # fmt: skip
