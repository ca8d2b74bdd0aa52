"""Products of matrices that each stage of a zero-bubble pipeline computes, in eager and compiled.

In: rank, number of ranks, a rendezvous file, and the name of a schedule. Out: nothing, or an assertion that
fails in the parent too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    stage,
)

from distributed.group import joined

#: by schedule: its class, and the numbers of the stages that a rank has.
SCHEDULES: dict[str, tuple[Any, Callable[[int], tuple[int, int]]]] = {
    "interleaved": (ScheduleInterleavedZeroBubble, lambda rank: (rank, rank + 2)),
    "V": (ScheduleZBVZeroBubble, lambda rank: (rank, 3 - rank)),
}
HALVES = ("stage_backward_input", "stage_backward_weight")


class Layers(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        """Apply them."""
        out: Tensor = self.layers(x)
        return out


def _train(
    name: str, rank: int, device: torch.device, is_compiled: bool
) -> tuple[list[Tensor], dict[str, set[int]]]:
    """Gradients of two steps, and the numbers of products in the halves of all backwards."""
    torch.manual_seed(0)
    net = [Layers().to(device) for _ in range(4)]
    schedule, places = SCHEDULES[name]
    own = [net[place] for place in places(rank)]
    for block in own if is_compiled else ():
        block.compile(backend="retrograd", options={"backend": "eager"})
    stages = [PipelineStage(net[place], place, 4, device) for place in places(rank)]
    step = schedule(stages, 4, loss_fn=lambda y, target: (y - target).square().mean()).step
    is_last = 3 in places(rank)
    counts: dict[str, set[int]] = defaultdict(set)

    def counting(half: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.profiler.profile(use_kineto=False) as profile:
                found = run(*args, **kwargs)
            names = [event.name for event in profile.function_events]
            counts[half].add(names.count("aten::mm") + names.count("aten::addmm"))
            return found

        return counted

    with mock.patch.multiple(stage, **{half: counting(half, getattr(stage, half)) for half in HALVES}):
        for number in range(2):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number)).to(device)
            step(*([x] if rank == 0 else []), **({"target": torch.zeros_like(x)} if is_last else {}))
    return [p.grad for block in own for p in block.parameters() if p.grad is not None], dict(counts)


def compare(rank: int, ranks: int, rendezvous: str, name: str) -> None:
    """Run on one rank: compiled stages must compute as many products as eager's, and give their bits."""
    with joined(rank, ranks, rendezvous) as device:
        eager, wanted = _train(name, rank, device, False)
        ours, found = _train(name, rank, device, True)
        assert found == wanted == {half: {4} for half in HALVES}, (found, wanted)
        assert len(eager) == 16
        assert all(map(torch.equal, ours, eager))
