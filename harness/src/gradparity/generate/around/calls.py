"""Calls: how the run compiles and calls the function.

In: a draft and what is returned. Out: what is compiled, and the lines of one call or of two: under a mode
that ends before the backward, with the whole function under a checkpoint, as a region, or with other
arguments. Inside the function, `kinds/islands.py` does the same for a part of it.
"""

from __future__ import annotations

from dataclasses import replace
from textwrap import indent

import torch

from gradparity.generate.around.outputs import Output, Outputs, observed
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
    "grad": ("with torch.no_grad():", "with torch.set_grad_enabled(False):"),
    "kernel": (
        "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):",
        "with torch.backends.mkldnn.flags(enabled=False):",
    ),
}
"""By kind, what may stand around the call only."""

WHOLE = "checkpoint"
"""The kind that runs the whole function again in the backward."""
REGION = "region"
"""The kind that makes the whole function a region, which a compiler compiles once for all its calls."""
AGAIN = "again"
"""The kind that calls the function once more, often with a result of the first, and uses what both give."""

OTHER = "other"
"""The kind that calls the function once more, with arguments of another dtype or of another length."""
OTHERS = (
    "{0}.to(torch.float64)",
    "{0}.to(torch.bfloat16)",
    "torch.cat([{0}, {0}])",
    "torch.cat([{0}, {0}])",
    "torch.cat([{0}, {0}])",
    "{0}[:1].clone()",
)


def mode_around(draft: Draft) -> str:
    """The head of a with block around the call: a mode that the policy weighs, or nothing."""
    shares = draft.policy.called
    kinds = [kind for kind in shares if kind in MODES and draft.chance.flip(shares[kind])]
    return draft.chance.pick(MODES[kinds[0]]) if kinds else ""


def compiled(draft: Draft, target: str) -> str:
    """What is compiled: the target, a checkpoint of it, or a function that calls it as a region."""
    regions = draft.policy.called.get(REGION, 0)
    if regions and target == "program" and draft.chance.flip(regions):
        return "lambda *args: torch.compiler.nested_compile_region(program)(*args)"
    if not draft.chance.flip(draft.policy.called.get(WHOLE, 0)):
        return target
    return f"lambda *args: checkpoint({target}, *args, use_reentrant=False)"


def calls(draft: Draft, found: Outputs) -> tuple[list[str], tuple[Output, ...]]:
    """The calls, as often as the policy says, with what is observed of them; all tensors that they give."""
    chance = draft.chance
    lines = [f"{found.target} = f({', '.join(draft.params)})"] * chance.between(*draft.policy.calls)
    shown, given = observed(found.tensors), found.tensors
    if chance.flip(draft.policy.called.get(AGAIN, 0)):
        second = tuple(replace(each, name=each.name.replace("y", "z")) for each in found.tensors)
        target = found.target.replace("y", "z")
        arguments = [_passed_on(draft, name, found.tensors) for name in draft.params]
        shown += [f"{target} = f({', '.join(arguments)})", *observed(second)]
        given += second
    if draft.around:
        lines = [f"{draft.around}\n{indent(line, '    ')}" for line in lines]
    return [*lines, *shown], given


def other_call(draft: Draft, definition: str) -> list[str]:
    """A later call of the function with other arguments, if the policy wants one and eager can run it."""
    if not draft.chance.flip(draft.policy.called.get(OTHER, 0)):
        return []
    form, env = draft.chance.pick(OTHERS), dict(draft.env)
    given = [form.format(name) if _is_float(draft.env[name]) else name for name in draft.params]
    try:
        exec(f"{definition}\nprogram({', '.join(given)})", env)
    except Exception:  # sizes that the body knows, say
        return []
    return [f'p.value("other", f({", ".join(given)}))']


def _is_float(value: object) -> bool:
    return type(value) is torch.Tensor and value.is_floating_point()


def _passed_on(draft: Draft, name: str, given: tuple[Output, ...]) -> str:
    """A parameter, or an output of the first call that may stand for it."""
    value = draft.env[name]
    if type(value) is not torch.Tensor or draft.chance.flip(0.5):
        return name
    fitting = [each.name for each in given if each.shape == value.shape and each.value.dtype is value.dtype]
    return draft.chance.pick(fitting) if fitting else name
