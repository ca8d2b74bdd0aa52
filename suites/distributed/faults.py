"""Ranks that fail, or compile alone: what each of two gloo ranks shows in eager and compiled.

In: a number of runs. Out: for each program, way in and fault, how many runs ended as in eager, as JSON.

``python -m distributed.faults --runs N`` (in ``suites``) goes through all faults in turn. One rank raises, is
killed, gets other sizes or has compiled nothing yet. An outcome is what a rank has computed, which hooks it
has run and how it ended. A rank that is not done within a minute prints its stack and counts as hung.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import functools
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.multiprocessing import start_processes

import retrograd
from distributed import ranks
from distributed.group import joined

RANKS, STEPS, LIMIT = 2, 4, 60.0
Outcome = list[Any]


class Fault(NamedTuple):
    """What happens to one rank in one step. Acts "sizes" and "cold" come before the forward."""

    act: str
    place: str
    rank: int
    step: int


class Planted(RuntimeError):
    """The error of a rank that raises."""


class Happens:
    """Called at each place in the program; the fault happens at its own."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.step = fault, 0

    def is_now(self, place: str) -> bool:
        return (place, dist.get_rank(), self.step) == self.fault[1:]

    def __call__(self, place: str) -> None:
        if self.is_now(place) and self.fault.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_now(place) and self.fault.act == "raise":
            raise Planted(place)


class AllReduce(Function):
    """Sums over ranks in forward and backward, after the places at which faults happen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, happens: Happens) -> Tensor:
        ctx.happens = happens
        happens("forward")
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.happens("backward")
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad, None


class Summed(nn.Module):
    """The mean over the batch, summed over ranks, is added to each row."""

    def __init__(self, happens: Happens) -> None:
        super().__init__()
        self.happens = happens

    def forward(self, x: Tensor) -> Tensor:
        return x + AllReduce.apply(x.mean(0), self.happens)


def reduced_in_hooks(net: nn.Sequential) -> nn.Module:
    """Each gradient is summed over ranks by a hook that runs once it is accumulated."""
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return net


PROGRAMS: dict[str, Callable[[nn.Sequential], nn.Module]] = {"hooks": reduced_in_hooks, **ranks.WRAPPERS}
_BACKEND = {"backend": "retrograd", "options": {"backend": "eager"}}
#: by way in: what compiles the model, and the lowering of backwards, if they are captured
WAYS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "eager": (lambda model: model, None),
    "live": (lambda model: model, "eager"),
    "backend": (functools.partial(torch.compile, **_BACKEND), None),
    "compile": (functools.partial(retrograd.compile, backend="eager"), None),
    "live and backend": (functools.partial(torch.compile, **_BACKEND), "eager"),
    "inductor": (functools.partial(torch.compile, backend="retrograd"), None),
}
PLACES = ("forward", "backward", "hook")
FAULTS = [*itertools.product(("raise", "kill"), PLACES), ("sizes", "start"), ("cold", "start")]


def train(happens: Happens, program: str, way: str, outcome: Outcome) -> None:
    """Train a few steps; `outcome` gets the hooks, the loss and the gradients of each."""
    net = ranks.network()
    net.insert(3, Summed(happens))
    for name, p in net.named_parameters():
        p.register_hook(lambda grad, name=name: outcome.append(name))
    net[2].weight.register_hook(lambda grad: happens("hook"))
    compiling, backend = WAYS[way]
    model = PROGRAMS[program](net)
    called, context = compiling(model), retrograd.compiled_autograd(backend) if backend else None
    torch.manual_seed(dist.get_rank())
    for happens.step in range(STEPS):
        if happens.is_now("start") and happens.fault.act == "cold":
            torch._dynamo.reset()
            retrograd.reset()
        other = happens.is_now("start") and happens.fault.act == "sizes"
        loss = called(torch.randn(7 if other else 5, 4)).square().sum()
        with context or contextlib.nullcontext():
            loss.backward()
        grads = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in model.parameters()]
        outcome += [loss.item(), *(grad.tolist() for grad in grads)]
    assert way == "eager" or (context.explain().backwards if context else retrograd.explain().graphs)


def run(rank: int, folder: str, fault: Fault, program: str, way: str) -> None:
    """Run on one rank, which writes its outcome into the folder, unless it is killed or hangs.

    The process ends while it is in the group: when a peer had been killed, leaving the group took more than a
    minute under DDP, in eager too (torch 2.13).
    """
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    warnings.simplefilter("ignore")
    if fault.act == "cold" and fault.rank == rank:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cold"
    outcome: Outcome = []
    with joined(rank, RANKS, f"{folder}/rendezvous", datetime.timedelta(seconds=LIMIT / 2)):
        try:
            train(Happens(fault), program, way, outcome)
            dist.barrier()
        except Exception as error:
            cause = next((one for one in ("Planted", "peer") if one in f"{error!r}"), str(error))
            outcome += [type(error).__name__, cause]
        Path(folder, str(rank)).write_text(json.dumps(outcome))
        os._exit(0)


def outcomes(fault: Fault, program: str, way: str) -> list[Any]:
    """What each rank wrote, or the exit status of its process: -9 if it was killed, 1 if it hung."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "distributed.ranks"])
    with tempfile.TemporaryDirectory() as folder:
        given = folder, fault, program, way
        started = start_processes(run, given, RANKS, join=False, start_method="forkserver")
        for process in started.processes:
            process.join()
        files = [Path(folder, str(rank)) for rank in range(RANKS)]
        return [
            json.loads(file.read_text()) if file.exists() else process.exitcode
            for file, process in zip(files, started.processes, strict=True)
        ]


of_eager = functools.cache(functools.partial(outcomes, way="eager"))


def verdict(fault: Fault, program: str, way: str) -> str:
    """Whether both ranks end as in eager: "as eager", "hung" or "differs"."""
    expected, found = of_eager(fault, program), outcomes(fault, program, way)
    return "as eager" if found == expected and 1 not in expected else "hung" if 1 in found else "differs"


def main() -> None:
    """Go through all programs, ways and faults, in an order and at places that the number of a run gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--ways", default="live,backend,compile,live and backend")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    every = [*itertools.product(FAULTS, PROGRAMS, chosen.ways.split(","))]
    random.Random(0).shuffle(every)
    counts = {way: Counter[str]() for way in chosen.ways.split(",")}
    by_fault = {" ".join(fault): Counter[str]() for fault in FAULTS}
    for number, (named, program, way) in zip(range(chosen.runs), itertools.cycle(every)):
        at = random.Random(number)
        fault = Fault(*named, rank=at.randrange(RANKS), step=at.randrange(STEPS))
        found = verdict(fault, program, way)
        counts[way][found] += 1
        by_fault[" ".join(named)][found] += 1
        if found != "as eager":
            sys.stderr.write(f"{number}: {fault}, {program}, {way}: {found}\n")
    told = {
        "torch": torch.__version__,
        "device": f"{RANKS} gloo ranks on a CPU",
        "command": f"python -m distributed.faults --runs {chosen.runs} --ways '{chosen.ways}'",
        "by way": counts,
        "by fault": by_fault,
    }
    text = json.dumps(told, indent=1)
    sys.stdout.write(text + "\n")
    if chosen.out:
        chosen.out.write_text(text + "\n")
    sys.exit(sum(map(Counter.total, counts.values())) != sum(one["as eager"] for one in counts.values()))


if __name__ == "__main__":
    main()
