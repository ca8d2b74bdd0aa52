"""Settings: configuration of the compilers and modes of torch, as decorators of `run`.

In: a draft. Out: decorators in it. Eager does not care about most of them; a subject should not either.
"""

from __future__ import annotations

from gradparity.generate.draft import Draft

SETTINGS: dict[str, tuple[str, ...]] = {
    "budget": tuple(
        f"functorch_config.patch(activation_memory_budget={share})" for share in (0.1, 0.0, 0.3, 0.5)
    ),
    "recompute": (
        "functorch_config.patch(aggressive_recomputation=True)",
        "functorch_config.patch(recompute_views=True)",
        "functorch_config.patch(ban_recompute_not_in_allowlist=False)",
        "functorch_config.patch(ban_recompute_reductions=False)",
        "functorch_config.patch(ban_recompute_used_far_apart=False)",
        "functorch_config.patch(ban_recompute_materialized_backward=False)",
        "functorch_config.patch(treat_parameters_as_free_to_save=False)",
    ),
    "dynamic": (
        "dynamo_config.patch(assume_static_by_default=False)",
        "dynamo_config.patch(automatic_dynamic_shapes=False)",
        "dynamo_config.patch(specialize_float=True)",
        "dynamo_config.patch(capture_scalar_outputs=True)",
        "dynamo_config.patch(capture_dynamic_output_shape_ops=True)",
    ),
    "inductor": (
        "inductor_config.patch(pattern_matcher=False)",
        "inductor_config.patch(inplace_buffers=False)",
        "inductor_config.patch(allow_buffer_reuse=False)",
        "inductor_config.patch(max_fusion_size=1)",
        "inductor_config.patch(permute_fusion=True)",
        "inductor_config.patch(shape_padding=False)",
        "inductor_config.patch(layout_optimization=False)",
        "inductor_config.patch(joint_graph_constant_folding=False)",
        "inductor_config.patch(reorder_for_locality=False)",
        "inductor_config.patch(aggressive_fusion=True)",
        "inductor_config.patch(epilogue_fusion=False)",
        "inductor_config.patch(realize_reads_threshold=1)",
        "inductor_config.patch(split_reductions=False)",
        "inductor_config.patch(comprehensive_padding=False)",
        'inductor_config.patch("triton.cudagraphs", True)',
    ),
    "caches": (
        "functorch_config.patch(enable_autograd_cache=False)",
        "inductor_config.patch(fx_graph_cache=False)",
    ),
    "autograd": (
        "torch.autograd.set_multithreading_enabled(False)",
        "functorch_config.patch(donated_buffer=False)",
        "functorch_config.patch(view_replay_for_aliased_outputs=True)",
        "functorch_config.patch(functionalize_rng_ops=False)",
    ),
    "autocast": (
        'torch.autocast("cpu", dtype=torch.bfloat16)',
        'torch.autocast("cpu", enabled=False)',
    ),
}


def settings(draft: Draft) -> list[str]:
    """Decorators for `run`: of each kind that the policy weighs, one in this share of programs."""
    found = []
    for kind, share in draft.policy.settings.items():
        text = draft.chance.pick(SETTINGS[kind])
        if draft.chance.flip(share) and _exists(draft, text):
            found.append(text)
    return found


def _exists(draft: Draft, text: str) -> bool:
    """Whether this torch has the setting."""
    try:
        eval(text, draft.env)(lambda: None)()
    except Exception:
        return False
    return True
