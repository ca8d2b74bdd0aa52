"""Models of transformers made small by rules, not one by one.

In: a type of model, as the library names it. Out: the model, with random weights: of its default
configuration, sizes that have a name in a table are replaced by small ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from gradparity.corpus.zoo.transformers import VOCABULARY

#: of the library's mappings from types of models to classes, in the order in which a class is looked for.
MAPPINGS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": False,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": False,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": False,
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": True,
}

#: by size, the attributes of configurations that get it, if they have them.
SIZES: Mapping[int, tuple[str, ...]] = {
    0: ("pad_token_id",),
    1: ("bos_token_id", "n_group", "topk_group", "n_shared_experts", "mamba_n_groups"),
    2: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
        "num_decoder_layers", "num_encoder_layers", "num_key_value_heads", "multi_query_group_num",
        "num_experts_per_tok", "mamba_expand", "eos_token_id",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
        "decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
        "mamba_n_heads",
    ),
    8: (
        "head_dim", "d_kv", "kv_channels", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "state_size",
        "ssm_state_size", "mamba_d_state", "attention_window", "sliding_window",
    ),
    16: ("q_lora_rank", "kv_lora_rank", "mamba_d_head", "time_step_rank", "embedding_size"),
    24: ("moe_intermediate_size", "shared_expert_intermediate_size"),
    32: ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "word_embed_proj_dim", "lru_width"),
    48: (
        "intermediate_size", "d_ff", "ffn_dim", "ffn_hidden_size", "n_inner", "encoder_ffn_dim",
        "decoder_ffn_dim", "hidden_dim", "feed_forward_proj_dim",
    ),
    64: ("max_position_embeddings", "n_positions", "max_seq_len"),
    VOCABULARY: ("vocab_size",),
}  # fmt: skip
#: the same for images.
OF_IMAGES: Mapping[int, tuple[str, ...]] = {3: ("num_channels",), 8: ("patch_size",), 32: ("image_size",)}
#: the kind of each layer, one after the other.
KINDS = ("layer_types", "mlp_layer_types")
#: left as it is where the default is None: another model without it.
OPTIONAL = ("q_lora_rank", "sliding_window")
#: left out, one after the other, if a configuration with them is refused.
DOUBTFUL = ((), KINDS, ("head_dim",))


class Task(NamedTuple):
    """The names of a model's classes, and whether it takes images."""

    config: str
    model: str
    is_of_images: bool


@cache
def tasks() -> dict[str, Task]:
    """By type of model; empty without the library."""
    try:
        models = importlib.import_module("transformers.models.auto.modeling_auto")
        configs = importlib.import_module("transformers.models.auto.configuration_auto")
    except ImportError:
        return {}
    found: dict[str, Task] = {}
    for mapping, is_of_images in MAPPINGS.items():
        for kind, model in getattr(models, mapping).items():
            config = configs.CONFIG_MAPPING_NAMES.get(kind)
            if config is not None and kind not in found:
                found[kind] = Task(config, model if isinstance(model, str) else model[0], is_of_images)
    return found


def build(task: Task) -> Any:
    """The model, to be trained. Raises what the library raises if no small configuration suits it."""
    library: Any = importlib.import_module("transformers")
    config, model = getattr(library, task.config), getattr(library, task.model)
    *first, last = small_forms(config(), task.is_of_images)
    for sizes in first:
        with suppress(Exception):
            return model(config(**sizes))
    return model(config(**last))


def small_forms(default: Any, is_of_images: bool) -> Iterator[dict[str, Any]]:
    """Small sizes for a configuration like `default`, and the same with fewer of them."""
    sizes = {name: size for size, names in SIZES.items() for name in names}
    if is_of_images:
        sizes = {**sizes, **{name: size for size, names in OF_IMAGES.items() for name in names}}
        del sizes["vocab_size"]
    known = {name: getattr(default, name) for name in sizes if hasattr(default, name)}
    small: dict[str, Any] = {
        name: sizes[name]
        for name, value in known.items()
        if not isinstance(value, (list, tuple)) and not (value is None and name in OPTIONAL)
    }
    if hasattr(default, "use_cache"):
        small["use_cache"] = False
    if getattr(default, "is_encoder_decoder", False):
        small["decoder_start_token_id"] = 0
    for name in KINDS:
        if isinstance(kinds := getattr(default, name, None), (list, tuple)):
            small[name] = (list(dict.fromkeys(kinds)) * 2)[:2]
    if is_of_images and isinstance(depths := getattr(default, "depths", None), (list, tuple)):
        small["depths"] = [1] * len(depths)
    for left_out in DOUBTFUL:
        if left_out and small.keys().isdisjoint(left_out):
            continue  # it has been given
        yield {name: size for name, size in small.items() if name not in left_out}
