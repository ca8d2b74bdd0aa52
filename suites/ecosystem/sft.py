"""TRL's SFTTrainer: LoRA adapters of a small Llama, with checkpointed layers, which is its default."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import retrograd

WORDS = 256


def tokenizer() -> PreTrainedTokenizerFast:
    """One that needs no download; the data below are tokens already."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, WORDS)}}
    made = Tokenizer(WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


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
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    rows = Dataset.from_dict({"input_ids": torch.randint(2, WORDS, (16 * batch, 2 * width)).tolist()})
    with tempfile.TemporaryDirectory() as folder:
        options = SFTConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = SFTTrainer(
            model=prepare(model), args=options, train_dataset=rows, processing_class=tokenizer()
        )
        trainer.train()
    return model


if __name__ == "__main__":
    with retrograd.compiled_autograd() as compiled:
        train()
    print(compiled.explain())
