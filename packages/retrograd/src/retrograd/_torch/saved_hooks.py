"""Saved-tensor hooks that a user put around a call.

In: this thread's hooks. Out: why a compiled function must not save through them; None if it may.
"""

from __future__ import annotations

import torch

__all__ = ["why_saved_hooks_matter"]

#: hooks of torch's own that keep values as they are, whatever is saved.
_HARMLESS = ("torch.utils.checkpoint", "torch.autograd.graph", "retrograd")


def why_saved_hooks_matter() -> str | None:
    """Whether the innermost hooks may see which tensors are saved, or change them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or (getattr(hooks[0], "__module__", "") or "").startswith(_HARMLESS):
        return None
    return "saved-tensor hooks see, and may change, exactly what eager saves"
