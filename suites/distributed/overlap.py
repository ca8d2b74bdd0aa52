"""Training steps on several ranks: time, waits between streams, memory, and hidden communication.

In: the names of a model, wrappers and ways in, and the sizes of the model. Out: one JSON file, with the torch
version and the device. The ways take turns in one process for each rank, each with a model of its own.

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
from dataclasses import dataclass
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
#: Steps before the clock. By then a compiled step has been measured against eager.
WARM_UP = 12
SIZES = {"layers": 12, "width": 1536, "vocabulary": 32000, "batch": 32, "length": 1024}
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


class Llama(nn.Module):
    """The Llama of transformers; called with tokens of shape (batch, length), it returns the loss."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = max(1, width // 64)
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.blocks = self.model.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {"gpt": GPT, "llama": Llama}


def sharded(model: Any, on_gpu: bool) -> nn.Module:
    """Under FSDP2, block by block, in bfloat16 on a GPU."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def replicated(model: Any, on_gpu: bool) -> nn.Module:
    """Under DDP."""
    return DistributedDataParallel(model.bfloat16() if on_gpu else model)


WRAPPERS: dict[str, Callable[[Any, bool], nn.Module]] = {"fsdp2": sharded, "ddp": replicated}


def as_it_is(called: Any) -> Any:
    """What was given."""
    return called


@dataclass(frozen=True)
class Way:
    """What compiles each block, the wrapped model and the whole step, and the context of the backward."""

    block: Callable[[Any], Any] = as_it_is
    whole: Callable[[Any], Any] = as_it_is
    step: Callable[[Any], Any] = as_it_is
    backward: Callable[[], Context] = contextlib.nullcontext


WAYS: dict[str, Way] = {
    "eager": Way(),
    "stock per block": Way(block=torch.compile),
    "stock whole": Way(whole=torch.compile),
    "live": Way(backward=functools.partial(retrograd.compiled_autograd, backend="inductor")),
    "live, eager's kernels": Way(backward=functools.partial(retrograd.compiled_autograd, backend="eager")),
    "retrograd per block": Way(block=retrograd.compile),
    "retrograd whole": Way(whole=retrograd.compile),
    "step": Way(step=functools.partial(retrograd.compile_step, backend="inductor")),
}


class Trainee:
    """A model with its optimizer, trained in one way."""

    def __init__(self, way: str, wrapper: str, sizes: argparse.Namespace, device: torch.device) -> None:
        chosen = WAYS[way]
        torch.manual_seed(0)
        self._sizes, self._device = sizes, device
        self._numbers = torch.Generator().manual_seed(dist.get_rank())
        with device:
            model: Any = MODELS[sizes.model](sizes.layers, sizes.width, sizes.vocabulary)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = chosen.block(block)
        wrapped = WRAPPERS[wrapper](model, device.type == "cuda")
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
        called, context = chosen.whole(wrapped), chosen.backward()

        def train(tokens: Tensor) -> None:
            loss = called(tokens)
            with context:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        self._train = chosen.step(train)

    def step(self) -> float:
        """Train one step; its seconds."""
        shape = (self._sizes.batch, self._sizes.length)
        tokens = torch.randint(self._sizes.vocabulary, shape, generator=self._numbers).to(self._device)
        synchronize()
        begin = time.perf_counter()
        self._train(tokens)
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
        for _ in range(WARM_UP - 4):
            trainee.step()
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
                write(found, device, ranks, sizes)


def write(found: dict[str, Any], device: torch.device, ranks: int, sizes: argparse.Namespace) -> None:
    """Write what has been measured so far."""
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU"
    shape = {name: getattr(sizes, name) for name in ("model", *SIZES)}
    table = {"device": f"{ranks} × {name}", "torch": torch.__version__, "model": shape, "found": found}
    Path(sizes.out).write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Spawn the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--wrappers", default=",".join(WRAPPERS))
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--model", choices=[*MODELS], default="gpt")
    parser.add_argument("--rounds", type=int, default=6)
    for name, number in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    sizes = parser.parse_args()
    spawned(run, RANKS, sizes)
    sys.stdout.write(Path(sizes.out).read_text())


if __name__ == "__main__":
    main()
