"""The Trainer of transformers: a small Llama, two micro-batches a step, clipping and a schedule."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import retrograd

VOCABULARY = 256


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
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(VOCABULARY, (16 * batch, 2 * width))]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=2,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        Trainer(model=prepare(model), args=options, train_dataset=rows).train()
    return model


if __name__ == "__main__":
    with retrograd.compiled_autograd() as compiled:
        train()
    print(compiled.explain())
