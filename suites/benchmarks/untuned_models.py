"""Thirteen models that nobody tuned for: breaks in the graph, sizes that change, losses outside of the model.

In: a `Size`. Out: rows of `trained_models.TRAINED`. The first seven are those of which users measured steps
slower than stock's (Qwen3 and Swin for comparison); the others were chosen for what they do to a compiler:
two towers with one loss, checkpoints, a recurrent network that Dynamo does not trace, and batches
whose sizes differ.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .training_case import SMALL, Size, Trained, TrainedModel, gpt2, images, language, own_loss


def _transformer(model: str, config: Any, batch: Any, size: Size) -> Trained:
    """A model of transformers that computes its own loss."""
    made = getattr(importlib.import_module("transformers"), model)(config)
    return Trained(made, size.batches(batch), own_loss)


def _config(name: str, **given: Any) -> Any:
    return getattr(importlib.import_module("transformers"), name)(**given)


def _qwen3(size: Size) -> dict[str, Any]:
    real = {
        "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "intermediate_size": 2048, "head_dim": 64,
    }  # fmt: skip
    return size.pick(real, SMALL | {"num_key_value_heads": 2, "head_dim": 16})


#: patches, width, layers and heads of each stage, windows.
_SMALL_SWIN = ([4, 4], 32, [2, 2], [2, 4], [4, 4])


def _swin(size: Size) -> nn.Module:
    library = importlib.import_module("torchvision.models")
    make = library.swin_t if size.is_real else partial(library.SwinTransformer, *_SMALL_SWIN)
    made: nn.Module = make(num_classes=10)
    return made


def _efficientnet(size: Size) -> nn.Module:
    name = size.pick("efficientnet_b0", "test_efficientnet")
    made: nn.Module = importlib.import_module("timm").create_model(name, num_classes=10)
    return made.to(memory_format=torch.channels_last)


def _whisper(size: Size) -> Trained:
    """Speech to text: an encoder of sounds and a decoder of tokens, whose layers share their code."""
    width, layers, count = size.pick((512, 6, 8), (64, 2, 2))
    sound, text = size.pick((3000, 128), (64, 16))
    few = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    few |= {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    config = _config(
        "WhisperConfig", d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, max_source_positions=sound // 2, use_cache=False,
        **size.pick({}, few),
    )  # fmt: skip

    def batch() -> dict[str, torch.Tensor]:
        labels = torch.randint(3, config.vocab_size, (count, text))
        return {"input_features": torch.randn(count, 80, sound), "labels": labels}

    return _transformer("WhisperForConditionalGeneration", config, batch, size)


def _wav2vec2(size: Size) -> Trained:
    """Speech to letters: it leaves out layers and masks sounds at random, by numbers that Python reads."""
    narrow = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    given = size.pick({"num_hidden_layers": 8}, narrow | {"conv_dim": (32,) * 7})
    config = _config("Wav2Vec2Config", **given)
    count, sound = size.pick((8, 32000), (2, 6000))

    def batch() -> dict[str, torch.Tensor]:
        return {"input_values": torch.randn(count, sound), "labels": torch.randint(1, 32, (count, 8))}

    return _transformer("Wav2Vec2ForCTC", config, batch, size)


def _deeplab(size: Size) -> Trained:
    """Classes of pixels; the loss is computed outside, from a dictionary of outputs."""
    library = importlib.import_module("torchvision.models")
    count, side = size.pick((16, 224), (2, 64))
    if size.is_real:
        model = library.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    else:
        extractor = importlib.import_module("torchvision.models.feature_extraction").create_feature_extractor
        head = importlib.import_module("torchvision.models.segmentation.deeplabv3").DeepLabHead(128, 21)
        body = extractor(library.resnet18(weights=None), {"layer2": "out"})
        model = library.segmentation.DeepLabV3(body, head)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, 3, side, side), torch.randint(21, (count, side, side))

    return Trained(model, size.batches(batch), _pixels)


def _pixels(model: Any, batch: Any) -> torch.Tensor:
    pictures, classes = batch
    return functional.cross_entropy(model(pictures)["out"].float(), classes)


class Recommender(nn.Module):
    """A DLRM: bags of embeddings and numbers meet in products of pairs."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs)
        self.top = nn.Sequential(nn.Linear(width + pairs.shape[1], 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, numbers: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Logits (batch,) of numbers (batch, 13) and indices (tables, batch, bag)."""
        dense = self.bottom(numbers)
        looked_up = [bag(rows) for bag, rows in zip(self.bags, indices, strict=True)]
        vectors = torch.stack([dense, *looked_up], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.top(torch.cat([dense, products], 1))
        return logits.squeeze(1)


def _dlrm(size: Size) -> Trained:
    tables, rows, width, count = size.pick((26, 20_000, 64, 2048), (4, 100, 16, 8))

    def batch() -> tuple[torch.Tensor, ...]:
        indices = torch.randint(rows, (tables, count, 4))
        return torch.randn(count, 13), indices, torch.randint(2, (count,)).float()

    return Trained(Recommender(tables, rows, width), size.batches(batch), _clicks)


def _clicks(model: Any, batch: Any) -> torch.Tensor:
    numbers, indices, clicked = batch
    return functional.binary_cross_entropy_with_logits(model(numbers, indices).float(), clicked)


def _clip(size: Size) -> Trained:
    """Pictures and their texts: two towers, whose loss compares each with each."""
    small = SMALL | {"projection_dim": 32, "image_size": 32, "patch_size": 8, "max_position_embeddings": 16}
    small |= {"bos_token_id": 510, "eos_token_id": 511}
    names = ("text_config", "vision_config")
    config = _config("CLIPConfig", **size.pick({}, {"projection_dim": 32, **dict.fromkeys(names, small)}))
    count, side, text, tokens = size.pick((32, 224, 77, 49407), (2, 32, 16, 511))

    def batch() -> dict[str, Any]:
        written = torch.randint(3, tokens, (count, text))
        written[:, -1] = tokens  # the token that ends a text
        return {"input_ids": written, "pixel_values": torch.randn(count, 3, side, side)}

    def loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        return own_loss(model, batch | {"return_loss": True})

    made = importlib.import_module("transformers").CLIPModel(config)
    return Trained(made, size.batches(batch), loss)


def _segformer(size: Size) -> Trained:
    """Classes of pixels by attention over reduced maps."""
    small = {"hidden_sizes": [16, 32], "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 1]}
    small |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    config = _config("SegformerConfig", num_labels=21, **size.pick({}, small | {"decoder_hidden_size": 32}))
    count, side = size.pick((16, 224), (2, 32))

    def batch() -> dict[str, torch.Tensor]:
        labels = torch.randint(21, (count, side, side))
        return {"pixel_values": torch.randn(count, 3, side, side), "labels": labels}

    return _transformer("SegformerForSemanticSegmentation", config, batch, size)


class Recurrent(nn.Module):
    """A language model of an LSTM, which Dynamo leaves to eager: a break between two small graphs."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, words) of tokens (batch, length)."""
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens))[0])
        return logits


def _lstm(size: Size) -> Trained:
    words, width, shape = size.pick((10_000, 512, (32, 128)), (100, 32, (2, 8)))

    def batch() -> tuple[torch.Tensor]:
        return (torch.randint(words, shape),)

    return Trained(Recurrent(words, width), size.batches(batch), _next_word)


def _next_word(model: Any, batch: Any) -> torch.Tensor:
    (tokens,) = batch
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _gat(size: Size) -> Trained:
    """Classes of the nodes of a graph, by attention along edges; each batch has another number of edges."""
    nodes, edges, width = size.pick((10_000, 80_000, 64), (20, 40, 8))
    layer = importlib.import_module("torch_geometric.nn").GATConv
    model = importlib.import_module("torch_geometric.nn").Sequential(
        "x, edges",
        [
            (layer(width, width, heads=4), "x, edges -> x"),
            nn.ELU(),
            (layer(4 * width, width, heads=4), "x, edges -> x"),
            nn.ELU(),
            (layer(4 * width, 10, heads=1), "x, edges -> x"),
        ],
    )
    counts = iter(edges + more * (edges // 8) for more in range(3))

    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randn(nodes, width), torch.randint(nodes, (2, next(counts))), torch.randint(10, (nodes,))

    return Trained(model, size.batches(batch), _nodes, half=False)


def _nodes(model: Any, batch: Any) -> torch.Tensor:
    features, edges, classes = batch
    return functional.cross_entropy(model(features, edges), classes)


def _bart(size: Size) -> Trained:
    """Text to text, in batches of three lengths, as a loader pads them to their longest."""
    width, layers, count = size.pick((512, 6, 8), (32, 2, 2))
    config = _config(
        "BartConfig", d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, use_cache=False,
        vocab_size=size.pick(32000, 128), max_position_embeddings=size.pick(1024, 64),
    )  # fmt: skip
    lengths = iter(size.pick((512, 448, 384), (24, 16, 20)))

    def batch() -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, config.vocab_size, (count, next(lengths)))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return _transformer("BartForConditionalGeneration", config, batch, size)


def _checkpointed(size: Size) -> Trained:
    """GPT-2 with a checkpoint around each block."""
    made = language("GPT2Config", "GPT2LMHeadModel", gpt2).build(size)
    made.model.gradient_checkpointing_enable({"use_reentrant": False})
    return made


UNTUNED: Mapping[str, TrainedModel] = {
    "qwen3": language("Qwen3Config", "Qwen3ForCausalLM", _qwen3),
    "swin": images("torchvision", _swin),
    "efficientnet": images("timm", _efficientnet),
    "whisper": TrainedModel("transformers", _whisper),
    "wav2vec2": TrainedModel("transformers", _wav2vec2),
    "deeplab": TrainedModel("torchvision", _deeplab),
    "dlrm": TrainedModel("torch", _dlrm),
    "clip": TrainedModel("transformers", _clip),
    "segformer": TrainedModel("transformers", _segformer),
    "lstm": TrainedModel("torch", _lstm),
    "gat": TrainedModel("torch_geometric", _gat),
    "checkpointed": TrainedModel("transformers", _checkpointed),
    "bart": TrainedModel("transformers", _bart),
}
