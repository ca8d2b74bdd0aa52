"""The zoo of speed: ten models as people train them, from the libraries that define them. No downloads.

In: a name of `TRAINED` and a device. Out: a model, three batches, and the loss of a batch. On a GPU they have
published sizes and run under autocast to bfloat16, as trainers run them; on a CPU they are small, with the
operators of the real thing, in float32.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
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


def trained(name: str, device: str) -> Trained:
    """Build the model called `name`, always with the same weights and batches.

    Raises: ImportError where its package is not installed.
    """
    torch.manual_seed(0)
    made = TRAINED[name].build(Size(device))
    made.model.to(device).train()
    return made


def _own_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _language(config: str, model: str, sizes: Callable[[Size], dict[str, Any]]) -> TrainedModel:
    """A language model of transformers that predicts its own tokens: 8 x 512 of them, or 2 x 32."""

    def build(size: Size) -> Trained:
        library = importlib.import_module("transformers")
        given = sizes(size) | {"use_cache": False}
        made = getattr(library, model)(getattr(library, config)(**given))
        count, shape = made.config.vocab_size, size.pick((8, 512), (2, 32))

        def batch() -> dict[str, torch.Tensor]:
            tokens = torch.randint(3, count, shape)
            return {"input_ids": tokens, "labels": tokens.clone()}

        return Trained(made, size.batches(batch), _own_loss)

    return TrainedModel("transformers", build)


def _gpt2(size: Size) -> dict[str, Any]:
    small = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    return {} if size.is_real else {**small, "bos_token_id": None, "eos_token_id": None}


_SMALL = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128,
}  # fmt: skip


def _llama(size: Size) -> dict[str, Any]:
    real = {
        "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 2048,
    }  # fmt: skip
    return size.pick(real, _SMALL) | {"num_key_value_heads": size.pick(4, 2), "pad_token_id": 0}


def _bert(size: Size) -> dict[str, Any]:
    return {} if size.is_real else dict(_SMALL)


def _t5(size: Size) -> dict[str, Any]:
    small = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return size.pick({}, small) | {"decoder_start_token_id": 0}


def _experts(size: Size) -> dict[str, Any]:
    real = {
        "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "intermediate_size": 1024, "num_key_value_heads": 4,
    }  # fmt: skip
    experts = size.pick(8, 4)
    return size.pick(real, _SMALL | {"num_key_value_heads": 2}) | {
        "num_local_experts": experts, "output_router_logits": True, "pad_token_id": 0,
    }  # fmt: skip


def _images(package: str, make: Callable[[Size], nn.Module], real: int = 64) -> TrainedModel:
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


def _resnet50(size: Size) -> nn.Module:
    made: nn.Module = importlib.import_module("torchvision.models").resnet50(weights=None, num_classes=10)
    return made.to(memory_format=torch.channels_last)


def _convnext(size: Size) -> nn.Module:
    name = size.pick("convnext_tiny", "convnext_atto")
    made: nn.Module = importlib.import_module("timm").create_model(name, num_classes=10)
    return made.to(memory_format=torch.channels_last)


def _vit(size: Size) -> nn.Module:
    name, side = size.pick(("vit_base_patch16_224", 224), ("vit_tiny_patch16_224", 32))
    made: nn.Module = importlib.import_module("timm").create_model(name, num_classes=10, img_size=side)
    return made


def _diffusion(size: Size) -> Trained:
    """A U-Net that predicts the noise of images of 64 x 64, or of 16 x 16."""
    channels, side, count = size.pick(((128, 256, 256), 64, 16), ((16, 32, 32), 16, 2))
    model = importlib.import_module("diffusers").UNet2DModel(
        sample_size=side, in_channels=3, out_channels=3, layers_per_block=size.pick(2, 1),
        block_out_channels=channels, norm_num_groups=size.pick(32, 4),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip

    def batch() -> tuple[torch.Tensor, ...]:
        images = torch.randn(count, 3, side, side)
        return images, torch.randint(1000, (count,)), torch.randn_like(images)

    return Trained(model, size.batches(batch), _denoise)


def _denoise(model: Any, batch: Any) -> torch.Tensor:
    images, times, noise = batch
    return functional.mse_loss(model(images, times).sample.float(), noise)


def _schnet(size: Size) -> Trained:
    """Energies of molecules whose forces are fitted: a backward through a backward, in float32."""
    atoms, wide = size.pick((64, {}), (8, {"hidden_channels": 32, "num_filters": 32, "num_interactions": 2}))
    pairs = torch.cartesian_prod(torch.arange(atoms), torch.arange(atoms)).t().to(size.device)
    pairs = pairs[:, pairs[0] != pairs[1]]

    def graph(position: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pairs, (position[pairs[0]] - position[pairs[1]]).norm(dim=-1)

    model = importlib.import_module("torch_geometric.nn").SchNet(interaction_graph=graph, **wide)

    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randint(1, 9, (atoms,)), torch.randn(atoms, 3) * 3, torch.randn(atoms, 3)

    return Trained(model, size.batches(batch), _forces, half=False)


def _forces(model: Any, batch: Any) -> torch.Tensor:
    numbers, positions, forces = batch
    positions = positions.detach().requires_grad_()
    energy = model(numbers, positions).sum()
    (grad,) = torch.autograd.grad(energy, positions, create_graph=True)
    return functional.mse_loss(-grad, forces)


TRAINED: Mapping[str, TrainedModel] = {
    "gpt2": _language("GPT2Config", "GPT2LMHeadModel", _gpt2),
    "llama": _language("LlamaConfig", "LlamaForCausalLM", _llama),
    "bert": _language("BertConfig", "BertForMaskedLM", _bert),
    "t5": _language("T5Config", "T5ForConditionalGeneration", _t5),
    "experts": _language("MixtralConfig", "MixtralForCausalLM", _experts),
    "resnet50": _images("torchvision", _resnet50),
    "convnext": _images("timm", _convnext),
    "vit": _images("timm", _vit),
    "diffusion": TrainedModel("diffusers", _diffusion),
    "schnet": TrainedModel("torch_geometric", _schnet),
}
