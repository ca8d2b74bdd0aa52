"""What one rank of a distributed test does: a small network under eager and under a context, compared.

In: rank, number of ranks, a rendezvous file, and the names of the wrapper and the backend. Out: nothing, or
an assertion that fails in the parent too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograd

Context = contextlib.AbstractContextManager[object]


def network() -> nn.Sequential:
    """Three layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def replicated(net: nn.Sequential) -> nn.Module:
    """Under DDP, whose reducer is in C++."""
    return DistributedDataParallel(net)


def sharded(net: nn.Sequential) -> nn.Module:
    """Under FSDP2, layer by layer."""
    for layer in (net[0], net[2]):
        fully_shard(layer)
    return fully_shard(net)


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {"ddp": replicated, "fsdp2": sharded}


def gradients(wrapper: str, context: Context, rank: int) -> tuple[list[Tensor], list[str]]:
    """Gradients of this rank after two backwards, and the order in which they were accumulated."""
    net = WRAPPERS[wrapper](network())
    events: list[str] = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    torch.manual_seed(rank + 1)
    for _ in range(2):
        loss = net(torch.randn(5, 4)).pow(2).sum()
        with context:
            loss.backward()
    grads = [p.grad for p in net.parameters()]
    return [getattr(grad, "to_local", lambda grad=grad: grad)() for grad in grads], events


def compare(rank: int, ranks: int, rendezvous: str, wrapper: str, backend: str) -> None:
    """Run on one rank: eager and compiled must agree."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        eager, eager_events = gradients(wrapper, contextlib.nullcontext(), rank)
        context = retrograd.compiled_autograd(backend)
        ours, our_events = gradients(wrapper, context, rank)
        for one, two in zip(eager, ours, strict=True):
            if backend == "eager":
                assert torch.equal(one, two)
            torch.testing.assert_close(one, two)
        assert eager_events == our_events
        runs = sum(backward.runs for backward in context.explain().backwards)
        codes = {reason.code for reason in context.explain().fallbacks}
        assert (runs, codes) == (2, set())
    finally:
        dist.destroy_process_group()
