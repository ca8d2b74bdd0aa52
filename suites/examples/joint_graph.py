"""One joint graph, three uses: changed by a pass; compiled and trained; exported, and trained on elsewhere.

    python suites/examples/joint_graph.py                 all of it; `--backend eager` needs no C++ compiler
    python suites/examples/joint_graph.py --resume DIR    the second process: started by the first

A network with its loss is captured; a pass marks what its backward computes again instead of keeping it; what
remains is compiled and trained for 20 steps beside an eager twin. Then the same joint graph is written to a
file, and a process that does not know the model loads it and trains it on.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from retrograd import aot
from retrograd.aot import JointGraph

STEPS, RATE = 20, 0.05
#: products of matrices are kept; all between them is computed again in the backward.
KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Regression(nn.Module):
    """A small network with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean squared error."""
        return (self.body(x) - target).square().mean()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=generator)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


def recompute_between(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """A pass: marks each call of the forward half."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and not node.meta.get("is_backward"):
            is_kept = node.target in KEPT
            policy = CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.MUST_RECOMPUTE
            node.meta["recompute"] = policy
    return gm


def captured(model: nn.Module) -> JointGraph:
    """The joint graph, with the pass applied."""
    joint = aot.capture(aot.create_state(model, batch(0)))
    return joint.apply(recompute_between)


def train(
    loss_of: Callable[..., torch.Tensor], parameters: Mapping[str, nn.Parameter], first: int, last: int
) -> list[float]:
    """Plain gradient descent; the losses."""
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = loss_of(*batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled(
    joint: JointGraph, parameters: Mapping[str, nn.Parameter], backend: str
) -> Callable[..., torch.Tensor]:
    """A function of one batch with real autograd."""
    run = aot.compile(aot.partition(joint, "min_cut"), forward=backend)
    return functools.partial(run.with_state, parameters)


def begin(backend: str, folder: Path) -> None:
    """Capture, change, compile, train; export."""
    torch.manual_seed(0)
    model, twin = Regression(), Regression()
    twin.load_state_dict(model.state_dict())
    joint = captured(model)
    before = aot.partition(aot.capture(aot.create_state(model, batch(0))), "save_all").saved_bytes
    after = aot.partition(joint, "min_cut").saved_bytes
    print(f"saved for the backward: {after} bytes, without the pass {before}")
    parameters = dict(model.named_parameters())
    found = train(compiled(joint, parameters, backend), parameters, 0, STEPS)
    expected = train(twin, dict(twin.named_parameters()), 0, STEPS)
    _compare(found, expected, backend)
    _compare(
        [p.sum().item() for p in model.parameters()], [p.sum().item() for p in twin.parameters()], backend
    )
    print(f"{STEPS} steps with {backend}: loss {found[0]:.4f} -> {found[-1]:.4f}, as eager")

    aot.export(joint, folder / "joint")
    torch.save(twin.state_dict(), folder / "state")
    torch.save(train(twin, dict(twin.named_parameters()), STEPS, 2 * STEPS), folder / "expected")
    again = [sys.executable, __file__, "--resume", str(folder), "--backend", backend]
    subprocess.run(again, check=True)


def resume(backend: str, folder: Path) -> None:
    """Load, compile, train on."""
    joint = aot.load(folder / "joint")
    state = torch.load(folder / "state", weights_only=True)
    expected = torch.load(folder / "expected", weights_only=True)
    parameters = {name: nn.Parameter(value) for name, value in state.items()}
    found = train(compiled(joint, parameters, backend), parameters, STEPS, 2 * STEPS)
    _compare(found, expected, backend)
    print(f"{STEPS} more steps with {backend}: loss {found[0]:.4f} -> {found[-1]:.4f}, as eager")


def _compare(found: list[float], expected: list[float], backend: str) -> None:
    """To the bit under ``eager``; within float32's rounding under a compiler."""
    tolerance = 0.0 if backend == "eager" else 1e-4
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)


def main() -> None:
    """Both processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--resume", type=Path)
    given = parser.parse_args()
    if given.resume:
        resume(given.backend, given.resume)
        return
    with tempfile.TemporaryDirectory() as folder:
        begin(given.backend, Path(folder))


if __name__ == "__main__":
    main()
