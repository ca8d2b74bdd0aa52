"""Models that people train, from the libraries that define them: random weights, no downloads.

In: a device. Out: a module that returns its loss, and its input. On a GPU they have their published sizes and
bfloat16 weights; on a CPU they are small, with the operators of the real thing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class RealModel:
    """A model and the package that it comes from."""

    package: str
    build: Callable[[str], tuple[nn.Module, torch.Tensor]]

    @property
    def is_here(self) -> bool:
        """Whether its package is installed."""
        return importlib.util.find_spec(self.package) is not None


class LanguageModel(nn.Module):
    """The loss of a transformers model that is to say its own input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class Classifier(nn.Module):
    """The loss of an image model that is to find class 0 in each image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.model(images)
        target = torch.zeros(images.shape[0], dtype=torch.int64, device=images.device)
        return functional.cross_entropy(logits.float(), target)


def gpt2(device: str) -> tuple[nn.Module, torch.Tensor]:
    """GPT-2 with its language-model head, without dropout and cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    small = {**sizes, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(
        **({} if device == "cuda" else small),
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    return _language_model(GPT2LMHeadModel(config), device)


def bert(device: str) -> tuple[nn.Module, torch.Tensor]:
    """BERT with its masked-language-model head, without dropout."""
    from transformers import BertConfig, BertForMaskedLM

    small = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 512,
    }
    config = BertConfig(
        **({} if device == "cuda" else small),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        use_cache=False,
    )
    return _language_model(BertForMaskedLM(config), device)


def _language_model(model: nn.Module, device: str) -> tuple[nn.Module, torch.Tensor]:
    batch, sequence = (8, 512) if device == "cuda" else (2, 32)
    tokens = torch.randint(model.config.vocab_size, (batch, sequence))
    return LanguageModel(model.train().to(_dtype(device))), tokens


def resnet50(device: str) -> tuple[nn.Module, torch.Tensor]:
    """ResNet-50; its batch norms write their running statistics."""
    from torchvision.models import resnet50 as build

    batch, side = (32, 224) if device == "cuda" else (2, 32)
    images = torch.randn(batch, 3, side, side, dtype=_dtype(device))
    return Classifier(build(weights=None).train().to(_dtype(device))), images


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


MODELS: Mapping[str, RealModel] = {
    "gpt2": RealModel("transformers", gpt2),
    "bert": RealModel("transformers", bert),
    "resnet50": RealModel("torchvision", resnet50),
}
