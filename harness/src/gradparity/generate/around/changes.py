"""Changes between the phases: what happens after the forward and before the backward.

In: a draft and the outputs. Out: lines of the run that change inputs, outputs, buffers, `.grad` or random
state.
"""

from __future__ import annotations

import torch

from gradparity.generate.around.outputs import Output
from gradparity.generate.draft import Draft

PRESETS = (
    "torch.ones_like({x})",
    "torch.ones_like({x}).expand({x}.shape)",
    "torch.zeros({x}.shape, dtype={x}.dtype, device=p.device)",
    "torch.ones({x}.shape[::-1], dtype={x}.dtype, device=p.device).permute(*range({x}.ndim - 1, -1, -1))",
    "torch.ones((*{x}.shape, 2), dtype={x}.dtype, device=p.device)[..., 0]",
)
"""What `.grad` may be before the backward."""


def between(draft: Draft, found: tuple[Output, ...]) -> list[str]:
    """Changes in the share of programs that the policy says."""
    if not draft.chance.flip(draft.policy.between):
        return []
    forms = _of_inputs(draft) + _of_outputs(draft, found) + ["torch.rand(3)"]
    return draft.chance.some(draft.chance.shuffled(forms)[:2])


def _of_inputs(draft: Draft) -> list[str]:
    forms = []
    for name in draft.params:
        value = draft.env[name]
        if isinstance(value, torch.nn.Module):
            forms += [f"{name}.{key}.add_(1)" for key, _ in value.named_buffers() if "." not in key]
        if not isinstance(value, torch.Tensor):
            continue
        draft.intends.add("version")
        if value.requires_grad:
            forms += [f"with torch.no_grad():\n    {name}.add_(1)", f"{name}.data.add_(1)"]
        else:
            forms += [f"{name}.add_(1)", f"{name}.mul_(2)", f"{name}.zero_()"] * 2
        if value.requires_grad and value.is_leaf:
            preset = draft.chance.pick(PRESETS).replace("{x}", name)
            forms += [f"{name}.grad = {preset}"]
    return forms


def _of_outputs(draft: Draft, found: tuple[Output, ...]) -> list[str]:
    draft.intends.update(("version", "views"))
    forms = []
    for each in found:
        forms += [f"{each.name}.detach().mul_(2)", f"with torch.no_grad():\n    {each.name}.add_(1)"]
        forms += [f"{each.name}.mul_(2)"]
    return forms
