"""The host's time of a live backward whose graphs compute nothing.

In: who captures (retrograd or stock compiled autograd) and a workload. Out: seconds per autograd node, beside
those of eager, which does compute: what two processes say is compared by what eager takes in each. The
backend hands out tensors that were made before the clock started, one set a backward, so that a gradient can
be kept without a copy, as those of a real backend can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .clock import medians
from .models import workload
from .subjects import Context, retrograd_with, stock_with

WARM_UP = 5


@dataclass(eq=False)
class EmptyBackend:
    """A backend for whoever captures; call `prepare` before each backward."""

    makers: list[Callable[[], tuple[Any, ...]]] = field(default_factory=list)
    ready: list[tuple[Any, ...] | None] = field(default_factory=list)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Code that returns what was prepared for it."""
        number, outputs = len(self.makers), graph.graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list))
        self.makers.append(lambda: tuple(_made_like(output) for output in outputs))
        self.ready.append(None)

        def run(*args: Any) -> tuple[Any, ...]:
            prepared, self.ready[number] = self.ready[number], None
            return self.makers[number]() if prepared is None else prepared

        return run

    def prepare(self) -> None:
        """Make the outputs of the next backward."""
        self.ready = [maker() for maker in self.makers]


def _made_like(output: Any) -> Any:
    """A tensor of the form that a graph's output was traced with; what is no tensor, as it was traced."""
    if not isinstance(output, fx.Node):
        return output
    traced = output.meta["val"] if "val" in output.meta else output.meta.get("example_value")
    if not isinstance(traced, torch.Tensor):
        return _hint(traced)
    sizes, strides = [_hint(size) for size in traced.size()], [_hint(step) for step in traced.stride()]
    return torch.empty_strided(sizes, strides, dtype=traced.dtype, device=traced.device)


def _hint(size: Any) -> Any:
    """The value that a symbolic size was traced with."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


SUBJECTS: dict[str, Callable[[EmptyBackend], Context]] = {
    "retrograd": retrograd_with,
    "stock": lambda empty: stock_with(empty, dynamic=True),
    "stock-static": lambda empty: stock_with(empty, dynamic=False),
}


def host_time(subject: str, model: str = "chain", rounds: int = 200) -> dict[str, float]:
    """Median seconds of a backward with nothing to compute, divided by the autograd nodes of its graph.

    On CPU tensors; of eager and of the subject, taking turns. Besides, how many nodes these are.
    """
    program, empty = workload(model), EmptyBackend()

    def backward(context: Context) -> float:
        program.clear()
        loss = program.loss()
        empty.prepare()
        start = time.perf_counter()
        with context():
            loss.backward()
        return time.perf_counter() - start

    live = SUBJECTS[subject](empty)
    for _ in range(WARM_UP):
        backward(live)
    if any(parameter.grad is None for parameter in program.model.parameters()):
        raise RuntimeError(f"a backward of {subject} left a parameter without a gradient")
    nodes = node_calls(program.loss())
    timers = {"eager": lambda: backward(nullcontext), subject: lambda: backward(live)}
    seconds = medians(timers, rounds, seconds=20.0)
    return {name: median / nodes for name, median in seconds.items()} | {"nodes": nodes}


def node_calls(loss: torch.Tensor) -> int:
    """How many autograd nodes the backward of `loss` calls."""
    assert loss.grad_fn is not None
    seen, found = {loss.grad_fn}, [loss.grad_fn]
    while found:
        for node, _ in found.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                found.append(node)
    return len(seen)
