"""What one rank of a test does: every collective inside a Function, in forward and backward, beside eager.

In: rank, number of ranks, a rendezvous file, and the names of the ways in and of the operators. Out: nothing,
or an assertion that names each way and operator whose losses or gradients are not eager's. One rank comes
late to every collective, so a result that nobody waits for is seen.

``python -m distributed.functions`` (in ``suites``) runs all of them on two ranks: with NCCL if there are two
GPUs, else with gloo. ``--ways`` and ``--operators`` choose.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.autograd import Function
from torch.distributed.distributed_c10d import _coalescing_manager, _resolve_process_group
from torch.utils.checkpoint import checkpoint

import retrograd
from distributed.group import joined, spawned

#: of a collective: a tensor, the name of its group, and whether the program waits by a handle.
Operator = Callable[[Tensor, str, bool], Tensor]
Program = Callable[[Tensor, Tensor], Tensor]

RANKS = 2
_LENGTH = 1 << 16
_LATE = 0.02


def wait(work: Any, later: bool) -> None:
    """Wait for what was started with ``async_op``; without it, there is no handle."""
    if later:
        work.wait()


def all_reduce(x: Tensor, group: str, later: bool) -> Tensor:
    y = x.clone()
    wait(dist.all_reduce(y, group=_resolve_process_group(group), async_op=later), later)
    return y


def all_gather(x: Tensor, group: str, later: bool) -> Tensor:
    parts = [torch.empty_like(x), torch.empty_like(x)]
    wait(dist.all_gather(parts, x.contiguous(), _resolve_process_group(group), later), later)
    return parts[0] + 2 * parts[1]


def all_gather_into_tensor(x: Tensor, group: str, later: bool) -> Tensor:
    y = x.new_empty(2 * x.numel())
    wait(dist.all_gather_into_tensor(y, x.contiguous(), _resolve_process_group(group), later), later)
    return y.view(2, -1).sum(0)


def reduce_scatter_tensor(x: Tensor, group: str, later: bool) -> Tensor:
    y, to = x.new_empty(x.numel() // 2), _resolve_process_group(group)
    wait(dist.reduce_scatter_tensor(y, x.contiguous(), group=to, async_op=later), later)
    return torch.cat([y, y * 2])


def all_to_all_single(x: Tensor, group: str, later: bool) -> Tensor:
    y, to = torch.empty_like(x), _resolve_process_group(group)
    wait(dist.all_to_all_single(y, x.contiguous(), group=to, async_op=later), later)
    return y


def broadcast(x: Tensor, group: str, later: bool) -> Tensor:
    y = x.clone()
    wait(dist.broadcast(y, 1, _resolve_process_group(group), later), later)
    return y


def reduce(x: Tensor, group: str, later: bool) -> Tensor:
    y, to = x.clone(), _resolve_process_group(group)
    wait(dist.reduce(y, 0, group=to, async_op=later), later)
    return y if dist.get_rank() == 0 else x * 3


def gather(x: Tensor, group: str, later: bool) -> Tensor:
    parts = [torch.empty_like(x), torch.empty_like(x)] if dist.get_rank() == 0 else None
    wait(dist.gather(x.contiguous(), parts, 0, _resolve_process_group(group), later), later)
    return x * 3 if parts is None else parts[0] + 2 * parts[1]


def scatter(x: Tensor, group: str, later: bool) -> Tensor:
    y, parts = torch.empty_like(x), [x * 2, x * 3] if dist.get_rank() == 1 else None
    wait(dist.scatter(y, parts, 1, _resolve_process_group(group), later), later)
    return y


def send_and_receive(x: Tensor, group: str, later: bool) -> Tensor:
    y, to, other = torch.empty_like(x), _resolve_process_group(group), 1 - dist.get_rank()
    if later and x.device.type == "cpu":
        for work in (dist.isend(x.contiguous(), other, to), dist.irecv(y, other, to)):
            work.wait()
    elif other == 1:
        dist.send(x.contiguous(), other, to)
        dist.recv(y, other, to)
    else:
        dist.recv(y, other, to)
        dist.send(x.contiguous(), other, to)
    return y


def batched_send_and_receive(x: Tensor, group: str, later: bool) -> Tensor:
    y, to, other = torch.empty_like(x), _resolve_process_group(group), 1 - dist.get_rank()
    sends = [dist.P2POp(dist.isend, x.contiguous(), other, to), dist.P2POp(dist.irecv, y, other, to)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    return y


def coalesced(x: Tensor, group: str, later: bool) -> Tensor:
    y, z = x.clone(), x * 2
    device = None if x.device.type == "cpu" else x.device
    with _coalescing_manager(_resolve_process_group(group), device, later) as manager:
        dist.all_reduce(y, group=_resolve_process_group(group))
        dist.all_reduce(z, group=_resolve_process_group(group))
    wait(manager, later)
    return y + z


def future(x: Tensor, group: str, later: bool) -> Tensor:
    y = x.clone()
    work = dist.all_reduce(y, group=_resolve_process_group(group), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 2).wait()


def after_barrier(x: Tensor, group: str, later: bool) -> Tensor:
    wait(dist.barrier(_resolve_process_group(group), later), later)
    return x * 2


def objects(x: Tensor, group: str, later: bool) -> Tensor:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, dist.get_rank() + 1, _resolve_process_group(group))
    return x * sum(found)


def of_torch(x: Tensor, group: str, later: bool) -> Tensor:
    return differentiable.all_reduce(x.clone(), group=_resolve_process_group(group))


def functional_all_reduce(x: Tensor, group: str, later: bool) -> Tensor:
    return functional.all_reduce(x, "sum", group) * 1


OPERATORS: Sequence[Operator] = (
    *(all_reduce, all_gather, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, broadcast),
    *(reduce, gather, scatter, send_and_receive, batched_send_and_receive, coalesced, future),
    *(after_barrier, objects, of_torch, functional_all_reduce),
)


def in_function(operator: Operator, other_group: str) -> Program:
    """The collective in forward and backward, sync and async, on two groups, one of them in a checkpoint."""

    class Collective(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: str, later: bool) -> Tensor:
            ctx.group, ctx.later = group, later
            return operator(x, group, later)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
            return operator(grad, ctx.group, not ctx.later), None, None

    whole = dist.group.WORLD.group_name

    def program(x: Tensor, w: Tensor) -> Tensor:
        y = Collective.apply(x * 1.0, whole, False) * w
        z = checkpoint(lambda v: Collective.apply(v + 1, other_group, True) * w, y, use_reentrant=False)
        return (y + z * 0.5).sum()

    return program


WAYS: dict[str, Callable[[Program], Program]] = {
    "compile": lambda fn: retrograd.compile(fn, backend="eager"),
    "aten": lambda fn: retrograd.compile(fn, backend="aten"),
    "inductor": retrograd.compile,
    "backend": lambda fn: torch.compile(fn, backend="retrograd", options={"backend": "eager"}),
    "aot": lambda fn: retrograd.aot.function(fn, backend="eager"),
    "live": lambda fn: fn,
}


def results(program: Program, device: torch.device, steps: int) -> Iterator[Tensor]:
    """Loss and gradients of each step. This rank comes late if it is the second."""
    rank = dist.get_rank()
    for step in range(steps):
        x = (torch.arange(float(_LENGTH), device=device) % 7 + 10 * rank + step).requires_grad_()
        w = torch.linspace(1, 2, _LENGTH, device=device).requires_grad_()
        dist.barrier()
        _come_late(rank, device)
        loss = program(x, w)
        _come_late(rank, device)
        loss.backward()
        yield from (loss.detach(), *(value.grad for value in (x, w) if value.grad is not None))


def _come_late(rank: int, device: torch.device) -> None:
    if rank == 1:
        time.sleep(_LATE)
    if rank == 1 and device.type == "cuda":
        torch.cuda._sleep(10**7)


def step_results(program: Program, device: torch.device, steps: int) -> Iterator[Tensor]:
    """The same, where forward and backward are one compiled step."""

    @functools.partial(retrograd.compile_step, backend="eager")
    def step(x: Tensor, w: Tensor) -> Tensor:
        loss = program(x, w)
        loss.backward()
        return loss.detach()

    class _Done:
        """A loss whose backward the step has run."""

        def __init__(self, value: Tensor) -> None:
            self._value = value

        def backward(self) -> None:
            pass

        def detach(self) -> Tensor:
            return self._value

    return results(lambda x, w: _Done(step(x, w)), device, steps)  # type: ignore[arg-type,return-value]


def run(way: str, program: Program, device: torch.device, steps: int) -> list[Tensor]:
    """What a way in gives for a program."""
    torch._dynamo.reset()
    retrograd.reset()
    if way == "step":
        return list(step_results(program, device, steps))
    if way == "live":
        with retrograd.compiled_autograd("eager"):
            return list(results(program, device, steps))
    return list(results(WAYS[way](program), device, steps))


def compare(rank: int, ranks: int, rendezvous: str, ways: Sequence[str], operators: Sequence[str]) -> None:
    """Run on one rank: each way must give eager's bits; code of Inductor's, values as close as usual."""
    warnings.simplefilter("ignore")
    with joined(rank, ranks, rendezvous, datetime.timedelta(seconds=60)) as device:
        other = dist.new_group([*range(ranks)])
        programs = {op.__name__: in_function(op, other.group_name) for op in OPERATORS}
        wrong = []
        for name in operators:
            eager = list(results(programs[name], device, 2))
            for way in ways:
                found = run(way, programs[name], device, 2)
                same = torch.allclose if way == "inductor" else torch.equal
                if len(found) != len(eager) or not all(map(same, found, eager)):
                    wrong.append(f"{name} under {way}")
        assert not wrong, wrong


def main() -> None:
    """Spawn two ranks that compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="compile,aten,inductor,backend,step,aot,live")
    parser.add_argument("--operators", default=",".join(one.__name__ for one in OPERATORS))
    chosen = parser.parse_args()
    spawned(compare, RANKS, chosen.ways.split(","), chosen.operators.split(","))
    sys.stdout.write("all equal eager\n")


if __name__ == "__main__":
    main()
