"""A stage of a zero-bubble pipeline on one device: its forward, its input's gradient, its weights' gradients.

    python -m benchmarks.split_backward --device cuda --out FILE

In: a device. Out: JSON with what each way takes for the three together, and of the weights' half alone, in
seconds. The ways take turns in this process. Communication is left out: only the stage's own work differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import retrograd

from .clock import synchronize

#: layers, width, heads, microbatch, length.
SIZES = {"cuda": (4, 1536, 24, 4, 1024), "cpu": (2, 64, 4, 2, 16)}
WAYS: Mapping[str, Callable[[nn.Module], Any]] = {
    "eager": lambda stage: stage,
    "stock": torch.compile,
    "retrograd-compile": retrograd.compile,
}
WARM_UP, ROUNDS = 5, 40


def stage(device: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """Layers of a transformer in bfloat16, and the shape of a microbatch."""
    layers, width, heads, count, length = SIZES[device]
    torch.manual_seed(0)
    made = [
        nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(*made).to(device, torch.bfloat16), (count, length, width)


def timed(device: str, program: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds that a program takes on the device, and what it returns."""
    synchronize(device)
    start = time.perf_counter()
    result = program()
    synchronize(device)
    return time.perf_counter() - start, result


def measured(device: str, rounds: int = ROUNDS) -> dict[str, float]:
    """For each way: "WAY stage", "WAY least" and "WAY weights", the median and the shortest of the whole, and
    the median of the weights' half; for those but eager "WAY of eager", the median of the rounds' ratios."""
    torch._dynamo.config.recompile_limit = 64  # each way compiles the same code of the model
    stages = {}
    for way, compiled in WAYS.items():
        made, shape = stage(device)
        stages[way] = compiled(made), made
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(WARM_UP + rounds):
        for way, (model, made) in stages.items():
            x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            cotangent = torch.randn_like(x)
            forward, y = timed(device, lambda model=model, x=x: model(x))
            held = get_gradient_edge(y)  # torch 2.11 lets go of an autograd.Function between the halves
            halves = [y], [cotangent], [x], made.parameters()
            inputs, (_, groups) = timed(device, lambda halves=halves: stage_backward_input(*halves))
            weights, _ = timed(
                device, lambda made=made, groups=groups: stage_backward_weight(made.parameters(), groups)
            )
            del held
            made.zero_grad()
            if number >= WARM_UP:
                seconds[way].append((forward + inputs + weights, weights))
    return _figures(seconds)


def _figures(seconds: Mapping[str, list[tuple[float, float]]]) -> dict[str, float]:
    found = {}
    for way, turns in seconds.items():
        whole = [total for total, _ in turns]
        found[f"{way} stage"], found[f"{way} least"] = median(whole), min(whole)
        found[f"{way} weights"] = median(weights for _, weights in turns)
        if way != "eager":
            rounds = zip(whole, seconds["eager"], strict=True)
            found[f"{way} of eager"] = median(total / eager for total, (eager, _) in rounds)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="benchmarks.split_backward", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=[*SIZES], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="the file; without it, figures go to the terminal")
    given = parser.parse_args(arguments)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    said = {"torch": torch.__version__, "device": name, "seconds": measured(given.device, given.rounds)}
    text = json.dumps(said, indent=1)
    print(text, file=sys.stderr)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
