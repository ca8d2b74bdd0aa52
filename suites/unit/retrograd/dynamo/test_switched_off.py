"""Dynamo switched off, and warnings that are errors: programs run as with stock."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.programs

PROGRAM = """
import torch, retrograd

net, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
ran = []

def step(x):
    optimizer.zero_grad()
    hidden = net(x)
    loss = hidden.square().sum()
    loss.backward()
    optimizer.step()
    ran.append(1)
    return loss.detach()

start = {name: value.clone() for name, value in net.state_dict().items()}
expected = [step(x) for _ in range(4)]
net.load_state_dict(start)
compiled = retrograd.compile_step(step, backend="eager")
assert all(map(torch.equal, [compiled(x) for _ in range(4)], expected))
call = retrograd.compile(net, backend="eager")
call(x).sum().backward()
assert torch.equal(call(x), net(x))
again = torch.compile(net, backend="retrograd", options={"backend": "eager"})
assert torch.equal(again(x), net(x))
print(len(ran), "dynamo-disabled" in str(compiled.explain()), "not-compiled" in str(compiled.explain()))
"""


@pytest.mark.parametrize(
    ("variables", "options", "said"),
    [
        ({"TORCHDYNAMO_DISABLE": "1"}, (), "8 True False"),
        ({}, ("-W", "error::UserWarning"), "8 False False"),
        ({}, (), "8 False False"),
    ],
)
def test_a_program_runs_as_with_stock(variables: dict[str, str], options: tuple[str, ...], said: str) -> None:
    path = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, *options, "-c", PROGRAM]
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.stdout.strip() == said, done.stderr[-3000:]
