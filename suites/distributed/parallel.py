"""What one rank of a test does: a tensor-parallel network under eager and compiled, compared bit for bit.

In: rank, number of ranks, a rendezvous file. Out: nothing, or an assertion that fails in the parent too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import retrograd

PLANS: dict[str, Callable[[], dict[str, object]]] = {
    "columns, rows": lambda: {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "sequence": lambda: {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(1)),
        "3": SequenceParallel(),
        "4": ColwiseParallel(input_layouts=Shard(1)),
    },
}
WAYS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "eager": lambda module: module,
    "compile": lambda module: retrograd.compile(module, backend="eager"),
    "backend": lambda module: torch.compile(module, backend="retrograd", options={"backend": "eager"}),
}


def gradients(way: str, plan: str, ranks: int) -> list[Tensor]:
    """Outputs and gradients of this rank in two steps."""
    torch._dynamo.reset()
    retrograd.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 6))
    parallelize_module(net, init_device_mesh("cpu", (ranks,)), PLANS[plan]())  # type: ignore[arg-type]
    called, seen = WAYS[way](net), []
    for _ in range(2):
        x = torch.randn(2, 6, 4, requires_grad=True)
        y = called(x)
        y.pow(2).sum().backward()
        grads = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in net.parameters()]
        seen += [y.detach(), x.grad, *(grad.clone() for grad in grads)]
    return seen


def compare(rank: int, ranks: int, rendezvous: str) -> None:
    """Run on one rank: all ways must give eager's bits, with a compiled forward."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        for plan in PLANS:
            eager = gradients("eager", plan, ranks)
            for way in ("compile", "backend"):
                ours = gradients(way, plan, ranks)
                assert all(map(torch.equal, ours, eager)), (plan, way)
                report = retrograd.explain()
                assert report.graphs, (plan, way)
                assert not report.fallbacks, (plan, way, report.fallbacks)
    finally:
        dist.destroy_process_group()
