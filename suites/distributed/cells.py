"""Forty ways to train on several ranks, each in eager and compiled: parameters, hooks and collectives.

In: names of wrappers, modes and ways in. Out: for each cell and way, what differs from eager on any rank and
the codes of what ran in eager, as JSON.

``python -m distributed.cells`` (in ``suites``) runs them on gloo ranks, or with NCCL on enough GPUs.
The lowering keeps eager's kernels, so all values have to be equal to the bit. Torch's flight recorder tells
the collectives: their group, operator, dtypes and sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import retrograd
from distributed.group import joined, spawned
from distributed.outcomes import Outcome, difference, end, hashed, on_all_ranks

WIDTH, BLOCKS, BATCH, STEPS = 8, 4, 8, 3
Context = contextlib.AbstractContextManager[object]


class Block(nn.Module):
    """A residual block on values of shape (batch, WIDTH), which hooks can be set on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def network() -> nn.Sequential:
    """The same blocks on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


# wrappers


@dataclass(frozen=True)
class Wrapper:
    """Puts a network of blocks onto ranks.

    Attributes:
        wrap: the network, whose blocks may be compiled, the device and whether parameters are cast to
            bfloat16 -> a module.
        ranks: how many ranks it needs.
        casts: whether it casts parameters by itself in mode "mixed precision"; else autocast does.
        split: splits the layers of blocks over ranks. It looks for layers by name, so it comes before
            compilation.
    """

    wrap: Callable[[nn.Sequential, torch.device, bool], nn.Module] = lambda net, device, cast: net
    ranks: int = 2
    casts: bool = False
    split: Callable[[nn.Sequential, torch.device], object] = lambda net, device: None


def _policy(cast: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cast else MixedPrecisionPolicy()


def _sharded(net: nn.Sequential, mesh: DeviceMesh, cast: bool) -> nn.Module:
    for block in net:
        fully_shard(block, mesh=mesh, mp_policy=_policy(cast))
    return fully_shard(net, mesh=mesh, mp_policy=_policy(cast))


def fsdp2(net: nn.Sequential, device: torch.device, cast: bool) -> nn.Module:
    return _sharded(net, init_device_mesh(device.type, (2,)), cast)


def hsdp(net: nn.Sequential, device: torch.device, cast: bool) -> nn.Module:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    return _sharded(net, mesh, cast)


def _mesh(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "tensor"))


def split_layers(net: nn.Sequential, mesh: DeviceMesh) -> None:
    """Tensor parallelism over `mesh`."""
    for block in net:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


WRAPPERS: dict[str, Wrapper] = {
    "DDP": Wrapper(lambda net, device, cast: DistributedDataParallel(net)),
    "replicate": Wrapper(lambda net, device, cast: replicate(net)),
    "FSDP2": Wrapper(fsdp2, casts=True),
    "HSDP": Wrapper(hsdp, ranks=4, casts=True),
    "TP": Wrapper(split=lambda net, device: split_layers(net, init_device_mesh(device.type, (2,)))),
    "FSDP2 + TP": Wrapper(
        lambda net, device, cast: _sharded(net, _mesh(device)["data"], cast),
        ranks=4,
        casts=True,
        split=lambda net, device: split_layers(net, _mesh(device)["tensor"]),
    ),
    "1F1B": Wrapper(),
    "zero bubble": Wrapper(),
}
MODES = ("plain", "accumulation", "checkpoint", "offload", "mixed precision")
#: by way in: what compiles each block, and the context of each backward
WAYS: dict[str, tuple[Callable[[nn.Module], Any] | None, Callable[[], Context]]] = {
    "eager": (None, contextlib.nullcontext),
    "live": (None, functools.partial(retrograd.compiled_autograd, backend="eager")),
    "compile": (functools.partial(retrograd.compile, backend="eager"), contextlib.nullcontext),
}

#: how long a rank waits for another, which may have failed
LIMIT = timedelta(minutes=2)

#: Autocast casts a weight once for all four microbatches in eager, once for each call in compiled code, so
#: gradients of weights arrive earlier ("All compiled forwards" in docs/limits.md). Nothing else may differ.
KNOWN = {(f"{wrapper}, mixed precision", "compile") for wrapper in ("1F1B", "zero bubble")}


# one run


def _collectives(since: int) -> list[str]:
    """The collectives that this rank has started from number `since` on."""
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]  # type: ignore[attr-defined]
    shapes = "profiling_name", "input_dtypes", "input_sizes", "output_sizes"
    new = [one for one in entries if one["record_id"] >= since]
    return [f"{one['process_group'][1]} " + " ".join(str(one[key]) for key in shapes) for one in new]


def _recorded() -> int:
    return len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"])  # type: ignore[attr-defined]


def run(way: str, wrapper: str, mode: str, device: torch.device) -> Outcome:
    """Train a few steps in one way."""
    torch._dynamo.reset()
    retrograd.reset()
    compiling, context = WAYS[way]
    outcome, since = Outcome(), _recorded()
    kind = WRAPPERS[wrapper]
    net = network().to(device)
    kind.split(net, device)
    pipelined = wrapper in ("1F1B", "zero bubble")
    own = net[dist.get_rank() * 2 : dist.get_rank() * 2 + 2] if pipelined else net
    for number, block in enumerate(own):
        own[number] = checkpoint_wrapper(block) if mode == "checkpoint" else block
        if way == "compile" and wrapper == "zero bubble":  # torch refuses wrappers in this schedule
            own[number].compile(backend="retrograd", options={"backend": "eager"})
        elif compiling is not None:
            own[number] = compiling(own[number])
    model = kind.wrap(own, device, mode == "mixed precision")

    outcome.log_hooks(model)
    step = _pipeline(wrapper, model, device) if pipelined else _data_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if pipelined:  # the first call finds out sizes, with whatever lies in its buffers
        step(torch.zeros(BATCH, WIDTH, device=device), contextlib.nullcontext(), True)
        optimizer.zero_grad()
        outcome.hooks.clear()
        since = _recorded()
    casting = mode == "mixed precision" and not kind.casts
    for number in range(STEPS):
        torch.manual_seed(1 + number)
        x = torch.randn(2, BATCH, WIDTH, device=device)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast(device.type, torch.bfloat16, enabled=casting))
            if mode == "offload":
                stack.enter_context(torch.autograd.graph.save_on_cpu())
            passes = 2 if mode == "accumulation" else 1
            for each in range(passes):
                outcome.values.append(hashed(step(x[each], context(), each == passes - 1)))
        outcome.values += [hashed(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = [hashed(p) for p in model.parameters()]
    outcome.collectives = _collectives(since)
    outcome.fallbacks = sorted({reason.code for reason in retrograd.explain().fallbacks})
    return outcome


def _data_parallel(model: nn.Module) -> Callable[[Tensor, Context, bool], Tensor]:
    def step(x: Tensor, context: Context, is_last: bool) -> Tensor:
        quiet = getattr(model, "no_sync", None)
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
        with quiet() if quiet is not None and not is_last else contextlib.nullcontext():
            loss = model(x).float().square().mean()
            with context:
                loss.backward()
        return loss

    return step


def _pipeline(
    wrapper: str, model: nn.Module, device: torch.device
) -> Callable[[Tensor, Context, bool], Tensor | None]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(model, rank, ranks, device)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y.float() - target).square().mean()

    schedule: Any = (
        Schedule1F1B(stage, 4, loss_fn=loss)
        if wrapper == "1F1B"
        else ScheduleInterleavedZeroBubble([stage], 4, loss_fn=loss)
    )

    def step(x: Tensor, context: Context, is_last: bool) -> Tensor | None:
        losses: list[Tensor] = []
        with context:
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=torch.zeros_like(x), losses=losses)
        return torch.stack(losses) if losses else None

    return step


# all cells


def cells(rank: int, ranks: int, rendezvous: str, chosen: argparse.Namespace, out: str) -> None:
    """Run all cells that need so many ranks; the first rank writes what all have found."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100000"
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, Any]] = {}
    with joined(rank, ranks, rendezvous, LIMIT) as device:
        for wrapper in chosen.wrappers.split(","):
            ways = [way for way in chosen.ways.split(",") if not has_no_nodes(wrapper, way)]
            for mode in chosen.modes.split(",") if WRAPPERS[wrapper].ranks == ranks else ():
                found[f"{wrapper}, {mode}"] = cell(wrapper, mode, ways, device)
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def has_no_nodes(wrapper: str, way: str) -> bool:
    """Whether this torch frees the nodes of compiled stages between the halves of a backward. Before 2.13, it
    keeps only the Python object of an autograd.Function, and raises in the second half."""
    return wrapper == "zero bubble" and way == "compile" and torch.__version__ < "2.13"


def cell(wrapper: str, mode: str, ways: Sequence[str], device: torch.device) -> dict[str, Any]:
    """What each way shows on any rank; eager, run again, is the first of them."""
    found: dict[str, Any] = {}
    eager = run("eager", wrapper, mode, device)
    for way in ("eager", *ways):
        try:
            ours = run(way, wrapper, mode, device)
            here = difference(eager, ours), ours.fallbacks
        except Exception as error:
            here = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", []
        told = found[way] = on_all_ranks(*here)
        if dist.get_rank() == 0 and any(told.values()):
            sys.stderr.write(f"{wrapper}, {mode}, {way}: {told}\n")
    return found


def unexpected(found: dict[str, dict[str, Any]]) -> list[str]:
    """The cells and ways that are not as `KNOWN` says. Nothing may fall back."""
    return [
        f"{cell}, {way}: {told}"
        for cell, ways in found.items()
        for way, told in ways.items()
        if bool(told["differs"]) != ((cell, way) in KNOWN)
        or any(not text.startswith("hooks: ") or " | " in text for text in told["differs"])
        or told["fallbacks"]
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Spawn the ranks, print the table as JSON, and end with 1 and a list if a cell is unexpected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrappers", default=",".join(WRAPPERS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--ways", default="live,compile")
    parser.add_argument("--out")
    chosen = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for ranks in sorted({WRAPPERS[name].ranks for name in chosen.wrappers.split(",")}):
        with tempfile.NamedTemporaryFile() as out:
            spawned(cells, ranks, chosen, out.name)
            found |= json.loads(Path(out.name).read_text())
    end("cells", found, unexpected(found), chosen.out)


if __name__ == "__main__":
    main()
