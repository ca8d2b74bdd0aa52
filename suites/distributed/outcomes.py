"""What training left on a rank, how it differs from eager's, and the table of that.

In: a model to log, outcomes of two runs, and what all cells have found. Out: hashes, texts, and JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass
class Outcome:
    """What a run left on one rank: hashes of losses and gradients, hook events, collectives, parameters."""

    values: list[str] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    def log_hooks(self, model: nn.Module) -> None:
        """Set hooks on each normalisation and each parameter that requires grad; `hooks` receives what they
        see."""

        def called(name: str, value: Any) -> None:
            name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
            self.hooks.append(f"{name} {hashed(value)}")

        for name, module in model.named_modules():
            if "norm" in name.rpartition(".")[2]:
                module.register_full_backward_hook(lambda m, given, grads, name=name: called(name, grads[0]))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: called(name, p.grad))


def hashed(value: Any) -> str:
    """A short hash of a tensor's dtype, sizes and elements on this rank."""
    if value is None:
        return "None"
    local = (value.to_local() if isinstance(value, DTensor) else value).detach().cpu().contiguous()
    elements = local.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{local.dtype}{tuple(local.shape)}".encode() + elements).hexdigest()[:12]


def difference(eager: Outcome, ours: Outcome) -> str:
    """The parts in which they differ, each with the first place; empty if none."""
    told = []
    for part in ("values", "hooks", "collectives", "parameters"):
        before, after = getattr(eager, part), getattr(ours, part)
        if before != after:
            pairs = enumerate(zip(before, after, strict=False))
            at = next((n for n, (one, two) in pairs if one != two), min(len(before), len(after)))
            numbers = f"{len(after)} for {len(before)}"
            told.append(f"{part}: {numbers}; number {at}: {after[at : at + 1]} for {before[at : at + 1]}")
    return " | ".join(told)


def on_all_ranks(difference: str, fallbacks: Sequence[str]) -> dict[str, list[str]]:
    """What differs on any rank, and the codes of what ran in eager, from what this rank has found."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (difference, fallbacks))
    codes = {code for _, all_codes in everywhere for code in all_codes}
    return {"differs": [text for text, _ in everywhere if text], "fallbacks": sorted(codes)}


def end(kind: str, found: dict[str, Any], unexpected: Sequence[str], out: str | None) -> NoReturn:
    """Print what was found as JSON, write it to the file `out` too, and end with 1 and a list if something is
    unexpected."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(told)}" for name, told in found.items())
    text = f'{{\n "torch": "{torch.__version__}",\n "{kind}": {{\n{lines}\n }}\n}}\n'
    sys.stdout.write(text)
    if out:
        Path(out).write_text(text)
    sys.exit("\n".join(unexpected) or 0)
