"""The zoo of speed: models as people train them, from the libraries that define them. No downloads.

In: a name of `TRAINED` and a device. Out: a model, three batches, and the loss of a batch, in the size that
`training_case` says. The ten here are those that retrograd was tuned on; `untuned_models` has the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .training_case import SMALL, Size, Trained, TrainedModel, gpt2, images, language
from .untuned_models import UNTUNED


def trained(name: str, device: str) -> Trained:
    """Build the model called `name`, always with the same weights and batches.

    Raises: ImportError where its package is not installed.
    """
    torch.manual_seed(0)
    made = TRAINED[name].build(Size(device))
    made.model.to(device).train()
    return made


def _llama(size: Size) -> dict[str, Any]:
    real = {
        "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 2048,
    }  # fmt: skip
    return size.pick(real, SMALL) | {"num_key_value_heads": size.pick(4, 2), "pad_token_id": 0}


def _bert(size: Size) -> dict[str, Any]:
    return {} if size.is_real else dict(SMALL)


def _t5(size: Size) -> dict[str, Any]:
    small = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return size.pick({}, small) | {"decoder_start_token_id": 0}


def _experts(size: Size) -> dict[str, Any]:
    real = {
        "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "intermediate_size": 1024, "num_key_value_heads": 4,
    }  # fmt: skip
    experts = size.pick(8, 4)
    return size.pick(real, SMALL | {"num_key_value_heads": 2}) | {
        "num_local_experts": experts, "output_router_logits": True, "pad_token_id": 0,
    }  # fmt: skip


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


#: by name.
TUNED: Mapping[str, TrainedModel] = {
    "gpt2": language("GPT2Config", "GPT2LMHeadModel", gpt2),
    "llama": language("LlamaConfig", "LlamaForCausalLM", _llama),
    "bert": language("BertConfig", "BertForMaskedLM", _bert),
    "t5": language("T5Config", "T5ForConditionalGeneration", _t5),
    "experts": language("MixtralConfig", "MixtralForCausalLM", _experts),
    "resnet50": images("torchvision", _resnet50),
    "convnext": images("timm", _convnext),
    "vit": images("timm", _vit),
    "diffusion": TrainedModel("diffusers", _diffusion),
    "schnet": TrainedModel("torch_geometric", _schnet),
}
TRAINED: Mapping[str, TrainedModel] = {**TUNED, **UNTUNED}
