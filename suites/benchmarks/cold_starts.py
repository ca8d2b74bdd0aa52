"""Cold starts of small models, many at a time: does any fail, or run as eager runs it?

In: how many starts, how many at once. Out: a file with one row a start: model, seconds of two compiled steps,
reasons of fallbacks; or what the process said when it failed. Each is a fresh process with empty caches and
all of its compile workers, so that they are far more than there are cores. Needs transformers and a GPU.

    python -m benchmarks.cold_starts 200 --at-once 16 --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .fresh import MeasurementError, measure_cold_and_warm

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT, IMAGE = {**SMALL, "vocab_size": 90}, {**SMALL, "image_size": 32, "patch_size": 8}
#: seconds for one start.
LIMIT = 600
Made = tuple[nn.Module, torch.Tensor]


def mlp() -> Made:
    """Four linear layers, normalised."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(16, 64)


def convnet() -> Made:
    """Two convolutions, normalised and pooled."""
    first = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(16 * 6 * 6, 10)), torch.randn(8, 3, 18, 18)


def attention() -> Made:
    """torch's own encoder."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(4, 10, 32)


def embedding() -> Made:
    """Tokens, summed up and read out."""
    return nn.Sequential(nn.Embedding(50, 32), nn.Tanh(), nn.Linear(32, 50)), torch.randint(0, 50, (4, 12))


def of_transformers(name: str, inputs: Callable[[], torch.Tensor], **sizes: Any) -> Callable[[], Made]:
    """A model of transformers with random weights; `name` is the class, "LlamaForCausalLM"."""

    def make() -> Made:
        import transformers

        model = getattr(transformers, name)
        return model(model.config_class(**sizes)), inputs()

    return make


def tokens() -> torch.Tensor:
    """Two sequences of token numbers."""
    return torch.randint(0, 90, (2, 12))


def pixels() -> torch.Tensor:
    """Two images."""
    return torch.randn(2, 3, 32, 32)


MODELS: Mapping[str, Callable[[], Made]] = {
    "mlp": mlp,
    "convnet": convnet,
    "attention": attention,
    "embedding": embedding,
    "gpt2": of_transformers("GPT2LMHeadModel", tokens, vocab_size=90, n_embd=32, n_layer=2, n_head=4),
    "vit": of_transformers("ViTModel", pixels, **IMAGE),
    "llama": of_transformers("LlamaForCausalLM", tokens, **TEXT, num_key_value_heads=2),
    "qwen2": of_transformers("Qwen2ForCausalLM", tokens, **TEXT, num_key_value_heads=2),
    "convnext": of_transformers("ConvNextModel", pixels, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "clip": of_transformers("CLIPVisionModel", pixels, **IMAGE),
}


def cold_start(name: str, device: str) -> dict[str, Any]:
    """Two steps of a model in this process: seconds, and why something ran as eager runs it."""
    import retrograd

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model, inputs = model.to(device), inputs.to(device)
    began, compiled = time.perf_counter(), retrograd.compile(model)
    for _ in range(2):
        found = compiled(inputs)
        if not isinstance(found, torch.Tensor):
            found = found.get("logits", found.get("last_hidden_state"))
        found.square().mean().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = round(time.perf_counter() - began, 2)
    return {"seconds": seconds, "fallbacks": [str(reason) for reason in retrograd.explain().fallbacks]}


def started(name: str, device: str) -> dict[str, Any]:
    """The same in a process of its own, with empty caches."""
    try:
        found = measure_cold_and_warm("cold_start", limit=LIMIT, runs=("cold",), name=name, device=device)
    except MeasurementError as error:
        return {"model": name, "failed": str(error)}
    return {"model": name, **found["cold"]}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", nargs="?", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    names = [list(MODELS)[number % len(MODELS)] for number in range(asked.count)]
    with ThreadPoolExecutor(asked.at_once) as pool:
        rows = list(pool.map(lambda name: started(name, asked.device), names))
    failed = [row for row in rows if "failed" in row]
    if asked.out:
        device = torch.cuda.get_device_name() if asked.device == "cuda" else asked.device
        told = {"at_once": asked.at_once, "device": device, "rows": rows, "torch": torch.__version__}
        asked.out.write_text(json.dumps(told, indent=1) + "\n")
    eager = sum(bool(row.get("fallbacks")) for row in rows)
    print(f"{len(rows)} starts, {len(failed)} failed, {eager} fell back")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
