"""Training steps of a GPT on several ranks: time, waits between streams, memory, and hidden communication.

In: the names of wrappers and ways in, and the sizes of the model. Out: one JSON file, with the torch version
and the device. The ways take turns in one process for each rank, each with a model of its own.

``python -m distributed.overlap --out FILE`` (in ``suites``) uses two GPUs with NCCL, or else two gloo ranks.
Hidden communication is the share of the time of NCCL's kernels during which another kernel runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograd
from distributed.group import joined, spawned

RANKS = 2
Context = contextlib.AbstractContextManager[object]


class Block(nn.Module):
    """A causal transformer block; values have shape (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """Embedding, blocks and a head; called with tokens of shape (batch, length), it returns the loss."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def sharded(model: GPT, on_gpu: bool) -> nn.Module:
    """Under FSDP2, block by block, in bfloat16 on a GPU."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def replicated(model: GPT, on_gpu: bool) -> nn.Module:
    """Under DDP."""
    return DistributedDataParallel(model.bfloat16() if on_gpu else model)


WRAPPERS: dict[str, Callable[[GPT, bool], nn.Module]] = {"fsdp2": sharded, "ddp": replicated}

#: By way in: what compiles each block, and the context of the backward.
WAYS: dict[str, tuple[Callable[[Any], Any] | None, Callable[[], Context]]] = {
    "eager": (None, contextlib.nullcontext),
    "stock per block": (torch.compile, contextlib.nullcontext),
    "live": (None, functools.partial(retrograd.compiled_autograd, backend="inductor")),
    "live, eager's kernels": (None, functools.partial(retrograd.compiled_autograd, backend="eager")),
    "retrograd per block": (retrograd.compile, contextlib.nullcontext),
}


class Trainee:
    """A model with its optimizer, trained in one way."""

    def __init__(self, way: str, wrapper: str, sizes: argparse.Namespace, device: torch.device) -> None:
        compiling, context = WAYS[way]
        torch.manual_seed(0)
        self._sizes, self._device, self._numbers = (
            sizes,
            device,
            torch.Generator().manual_seed(dist.get_rank()),
        )
        with device:
            model = GPT(sizes.layers, sizes.width, sizes.vocabulary)
        if compiling is not None:
            for number, block in enumerate(model.blocks):
                model.blocks[number] = compiling(block)
        self._model = WRAPPERS[wrapper](model, device.type == "cuda")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._context = context()

    def step(self) -> float:
        """Train one step; its seconds."""
        shape = (self._sizes.batch, self._sizes.length)
        tokens = torch.randint(self._sizes.vocabulary, shape, generator=self._numbers).to(self._device)
        synchronize()
        begin = time.perf_counter()
        loss = self._model(tokens)
        with self._context:
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        synchronize()
        return time.perf_counter() - begin


def synchronize() -> None:
    """Wait for the device and the other ranks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


@contextlib.contextmanager
def waits_counted() -> Iterator[list[None]]:
    """Inside, each ``wait_stream`` adds an item."""
    original, counted = torch.cuda.Stream.wait_stream, []

    def counting(self: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        counted.append(None)
        original(self, other)

    torch.cuda.Stream.wait_stream = counting  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        torch.cuda.Stream.wait_stream = original  # type: ignore[method-assign]


def hidden_share(step: Callable[[], object]) -> float | None:
    """The share of the time of NCCL's kernels in four steps during which another kernel runs."""
    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        for _ in range(4):
            step()
    spans = [
        (event.time_range.start, event.time_range.end, "nccl" in event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in event.name
    ]
    edges = sorted((at, is_nccl, by) for a, b, is_nccl in spans for at, by in ((a, 1), (b, -1)))
    running, before, total, hidden = {True: 0, False: 0}, 0.0, 0.0, 0.0
    for at, is_nccl, by in edges:
        if running[True]:
            total += at - before
            hidden += (at - before) if running[False] else 0.0
        running[is_nccl] += by
        before = at
    return hidden / total if total else None


def measure(trainees: dict[str, Trainee], rounds: int) -> dict[str, dict[str, float | None]]:
    """Figures of each way: milliseconds, waits, MiB."""
    found: dict[str, dict[str, float | None]] = {}
    seconds: dict[str, list[float]] = {way: [] for way in trainees}
    for way, trainee in trainees.items():
        begin = time.perf_counter()
        for _ in range(4):
            trainee.step()
        found[way] = {"first four steps, s": round(time.perf_counter() - begin, 2)}
    for _ in range(rounds):
        for way, trainee in trainees.items():
            seconds[way] += [trainee.step() for _ in range(4)][1:]
    for way, trainee in trainees.items():
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with waits_counted() as waits:
            trainee.step()
        if torch.cuda.is_available():
            found[way]["peak above rest, MiB"] = (torch.cuda.max_memory_allocated() - before) >> 20
        found[way] |= {
            "step, median, ms": round(1000 * statistics.median(seconds[way]), 2),
            "step, shortest, ms": round(1000 * min(seconds[way]), 2),
            "wait_stream": len(waits),
            "hidden communication": hidden_share(trainee.step),
        }
    return found


def run(rank: int, ranks: int, rendezvous: str, sizes: argparse.Namespace) -> None:
    """Measure on one rank; the first writes the file."""
    found = {}
    with joined(rank, ranks, rendezvous) as device:
        for wrapper in sizes.wrappers.split(","):
            trainees = {way: Trainee(way, wrapper, sizes, device) for way in sizes.ways.split(";")}
            found[wrapper] = measure(trainees, sizes.rounds)
            del trainees
            torch._dynamo.reset()
    if rank == 0:
        name = torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU"
        shape = {name: getattr(sizes, name) for name in ("layers", "width", "vocabulary", "batch", "length")}
        table = {"device": f"{ranks} × {name}", "torch": torch.__version__, "model": shape, "found": found}
        Path(sizes.out).write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Spawn the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--wrappers", default=",".join(WRAPPERS))
    parser.add_argument("--ways", default=";".join(WAYS))
    defaults = {"layers": 12, "width": 1536, "vocabulary": 32000, "batch": 32, "length": 1024, "rounds": 6}
    for name, number in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    sizes = parser.parse_args()
    spawned(run, RANKS, sizes)
    sys.stdout.write(Path(sizes.out).read_text())


if __name__ == "__main__":
    main()
