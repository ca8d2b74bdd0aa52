"""Training steps whose sizes change: eight lengths in turn, by each way of compiling.

In: a device. Out: one JSON line with, for each way, the shortest and the median seconds of a round over all
lengths, and the seconds until the first steady round. `python -m benchmarks.changing_sizes cuda`, started in
`suites`, prints it. The ways take turns, round by round, in one process.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import retrograd

from .clock import synchronize
from .figures import Machine

LENGTHS = (96, 160, 224, 128, 192, 288, 256, 320)
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "stock": functools.partial(torch.compile, dynamic=True),
    "stock-reduce-overhead": functools.partial(torch.compile, dynamic=True, mode="reduce-overhead"),
    "retrograd-compile": functools.partial(retrograd.compile, dynamic=True),
    "retrograd-reduce-overhead": functools.partial(retrograd.compile, dynamic=True, mode="reduce-overhead"),
}


class Block(nn.Module):
    """One layer of a decoder without a mask: attention and a perceptron, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result: float32 or bfloat16 (batch, length, width)."""
        heads = [one.unflatten(-1, (-1, 64)).transpose(1, 2) for one in self.qkv(self.first(x)).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


def prepared(way: str, device: str, layers: int, width: int) -> Callable[[], float]:
    """A round of training steps over all lengths, by this way; it returns the seconds that it took."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(layers))).to(device)
    opt = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    run = WAYS[way](model)
    batches = [torch.randn(4, length, width, device=device) for length in LENGTHS]

    def one_round() -> float:
        synchronize(device)
        begin = time.perf_counter()
        for batch in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = run(batch).float().square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        synchronize(device)
        return time.perf_counter() - begin

    return one_round


def measured(device: str, warm_ups: int = 6, rounds: int = 20, layers: int = 6, width: int = 256) -> Any:
    """The figures of all ways."""
    runs = {way: prepared(way, device, layers, width) for way in WAYS}
    starts = {way: sum(run() for _ in range(warm_ups)) for way, run in runs.items()}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, run in runs.items():
            found[way].append(run())
    figures = {
        way: {"shortest": min(took), "median": statistics.median(took), "start": starts[way]}
        for way, took in found.items()
    }
    notes = [f"{reason.code}: {reason.text}" for reason in retrograd.explain().notes]
    return {
        "machine": asdict(Machine.here(device)),
        "lengths": LENGTHS,
        "figures": figures,
        "counters": {name: count for name, count in retrograd.counters.items() if "graph" in name},
        "notes": notes,
    }


if __name__ == "__main__":
    print(json.dumps(measured(*sys.argv[1:2] or ["cpu"])))
