"""Architectures of transformers, small, with the losses and heads that the library gives them.

In: one row each: configuration class, model class, sizes, kind of batch. Out: recipes. Dropout stays as the
configuration has it.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from gradparity.corpus.zoo.recipe import Recipe, Trained, trained
from gradparity.probe import Probe

VOCABULARY, LENGTH = 97, 12
IMAGE = 32

_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "head_dim": 8}
_ENCODER = {key: _DECODER[key] for key in _DECODER if not key.startswith(("use", "bos", "eos"))}
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": IMAGE, "patch_size": 8, "num_labels": 4,
}  # fmt: skip
_AUDIO = {
    **_ENCODER, "conv_dim": [16, 16], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 32, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_CLIP = {
    "text_config": {**_ENCODER, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {key: _VISION[key] for key in _VISION if key != "num_labels"},
    "projection_dim": 16,
}  # fmt: skip

#: name: configuration, model, sizes, batch
ROWS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 0}, "causal"),
    "gpt2-checkpointed": ("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 0}, "causal checkpointed"),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED, "causal"),
    "llama-checkpointed": ("LlamaConfig", "LlamaForCausalLM", _GROUPED, "causal checkpointed"),
    "mistral": ("MistralConfig", "MistralForCausalLM", _GROUPED, "causal"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {
        **_GROUPED, "num_local_experts": 4, "output_router_logits": True}, "causal"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED, "causal"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED, "causal"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GROUPED, "causal"),
    "phi": ("PhiConfig", "PhiForCausalLM", _DECODER, "causal"),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _DECODER, "causal"),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}, "causal"),
    "bloom": ("BloomConfig", "BloomForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False,
        "pad_token_id": 0}, "causal"),
    "falcon": ("FalconConfig", "FalconForCausalLM", _DECODER, "causal"),
    "mamba": ("MambaConfig", "MambaForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "use_cache": False,
        "pad_token_id": 0, "use_associative_scan": False}, "causal"),  # used only where Dynamo traces
    "bert-masked": ("BertConfig", "BertForMaskedLM", _ENCODER, "masked"),
    "bert-classes": ("BertConfig", "BertForSequenceClassification", {**_ENCODER, "num_labels": 4}, "classes"),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**_ENCODER, "max_position_embeddings": 40}, "masked"),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {
        "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
        "max_position_embeddings": 32}, "masked"),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**_ENCODER, "embedding_size": 16}, "masked"),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**_ENCODER, "embedding_size": 16}, "masked"),
    "deberta-v2": ("DebertaV2Config", "DebertaV2ForMaskedLM", {
        **_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}, "masked"),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5, "sequence"),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART, "sequence"),
    "vit": ("ViTConfig", "ViTForImageClassification", _VISION, "image"),
    "swin": ("SwinConfig", "SwinForImageClassification", {
        "image_size": IMAGE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
        "window_size": 4, "num_labels": 4}, "image"),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": IMAGE, "num_labels": 4}, "image"),
    "segformer": ("SegformerConfig", "SegformerForImageClassification", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16, "num_labels": 4}, "image"),
    "clip": ("CLIPConfig", "CLIPModel", _CLIP, "pairs"),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", {**_AUDIO, "num_labels": 4}, "audio"),
}  # fmt: skip


def _build(config: str, model: str, sizes: dict[str, Any], kind: str, p: Probe) -> Trained:
    library = importlib.import_module("transformers")
    made = getattr(library, model)(getattr(library, config)(**sizes))
    if "checkpointed" in kind:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Trained(made, [_batch(kind.split()[0], p) for _ in range(2)], _loss)


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _batch(kind: str, p: Probe) -> dict[str, Any]:
    if kind == "image":
        return {"pixel_values": p.randn(2, 3, IMAGE, IMAGE), "labels": p.randint(4, 2)}
    if kind == "audio":
        return {"input_values": p.randn(2, 400), "labels": p.randint(4, 2)}
    tokens = p.randint(VOCABULARY - 3, 2, LENGTH) + 3
    if kind == "pairs":
        return {"input_ids": tokens, "pixel_values": p.randn(2, 3, IMAGE, IMAGE), "return_loss": True}
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    labels = p.randint(4, 2) if kind == "classes" else tokens.clone()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


TRANSFORMERS: dict[str, Recipe] = {
    f"transformers/{name}": trained("transformers", partial(_build, *row)) for name, row in ROWS.items()
}
