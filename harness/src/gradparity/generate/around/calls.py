"""Calls: how the run compiles and calls the function.

In: a draft and the text of a call. Out: what is compiled, and the lines of the call: under a mode that ends
before the backward, with the whole function under a checkpoint, or as a region. Inside the function,
`kinds/islands.py` does the same for a part of it.
"""

from __future__ import annotations

from textwrap import indent

from gradparity.generate.draft import Draft

MODES: dict[str, tuple[str, ...]] = {
    "autocast": (
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
        'with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):',
        'with torch.autocast("cpu", dtype=torch.float16):',
    ),
    "saved": (
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):",
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, 1), lambda packed: packed[0]):",
        "with torch.autograd.graph.save_on_cpu():",
    ),
    "mode": (
        "with torch.overrides.BaseTorchFunctionMode():",
        "with torch.enable_grad():",
        "with torch.autograd.set_multithreading_enabled(False):",
    ),
}
"""By kind, what may stand around the call only."""

WHOLE = "checkpoint"
"""The kind that runs the whole function again in the backward."""
REGION = "region"
"""The kind that makes the whole function a region, which a compiler compiles once for all its calls."""


def compiled(draft: Draft, target: str) -> str:
    """What is compiled: the target, a checkpoint of it, or a function that calls it as a region."""
    regions = draft.policy.called.get(REGION, 0)
    if regions and target == "program" and draft.chance.flip(regions):
        return "lambda *args: torch.compiler.nested_compile_region(program)(*args)"
    if not draft.chance.flip(draft.policy.called.get(WHOLE, 0)):
        return target
    return f"lambda *args: checkpoint({target}, *args, use_reentrant=False)"


def calls(draft: Draft, call: str) -> list[str]:
    """The call, as often as the policy says, under one of the modes that it weighs."""
    lines = [call] * draft.chance.between(*draft.policy.calls)
    for kind, share in draft.policy.called.items():
        if kind in MODES and draft.chance.flip(share):
            head = draft.chance.pick(MODES[kind])
            return [f"{head}\n{indent(line, '    ')}" for line in lines]
    return lines
