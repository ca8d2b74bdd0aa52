"""torch and retrograd alone, without NumPy: every way in works, as stock does."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys, warnings
sys.modules["numpy"] = None  # as if it were not installed
warnings.filterwarnings("ignore", message=".*NumPy|.*numpy")
import torch
import retrograd
from retrograd import aot

def loss(net, x):
    return torch.nn.functional.dropout(net(x), 0.5).square().sum()

def found(call, net, x):
    torch.manual_seed(0)
    net.zero_grad()
    value = call(net, x)
    if value.requires_grad:
        value.backward()
    return value.detach(), net.weight.grad.clone()

net, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
options = {"backend": "eager", "strict": True}
expected = found(loss, net, x)
with retrograd.compiled_autograd(backend="eager", strict=True):
    ways = [found(loss, net, x)]
ways.append(found(torch.compile(loss, backend="retrograd", options=options), net, x))
ways.append(found(lambda net, x: aot.function(loss, backend="eager", strict=True)(net, x), net, x))
joint = aot.capture(aot.create_state(net, (x,)))
import io
file = io.BytesIO()
aot.export(joint, file)
aot.compile(aot.partition(aot.load(file)), "aten")
for way in ways:
    assert all(map(torch.equal, way, expected)), (way, expected)
print("numpy" in {name for name, module in sys.modules.items() if module}, len(ways))
"""


def test_every_way_in_works_without_numpy() -> None:
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.stdout == "False 3\n", done.stderr[-3000:]
