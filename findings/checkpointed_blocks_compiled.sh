#!/usr/bin/env bash
# Reentrant checkpoints around the blocks of a network, torch 2.13.0: the blocks are trained only if they are compiled.
#
# Two blocks, each in a checkpoint with `use_reentrant=True`, and a last layer get data that require no grad, as from a frozen
# embedding. One step runs in eager, under `torch.compile(backend="eager")` and under "aot_eager"; weights are compared before and after.
#
# Guess: in eager the blocks get no gradient, and a warning says so. Compiled it is the same, or Dynamo breaks the graph there.
# Seen:  eager trains the last layer only, and warns. Compiled, the blocks have gradients and are trained, and nothing is said. So a
#        network that learns well while it is compiled stands still in eager.
# Why:   a reentrant checkpoint passes gradients on through its arguments only, and here none requires grad. Dynamo makes arguments of
#        the weights that a block reads, and differentiates through these.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)


def trained(backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    run = network if backend is None else torch.compile(network, backend=backend)
    layers = [*(block[0] for block in network.blocks), network.last]
    before = [layer.weight.detach().clone() for layer in layers]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    moved = [not torch.equal(old, layer.weight) for old, layer in zip(before, layers)]
    warned = any("None of the inputs have requires_grad" in str(one.message) for one in said)
    return moved, warned


found = {str(backend): trained(backend) for backend in (None, "eager", "aot_eager")}
for backend, (moved, warned) in found.items():
    print(f"{backend}: layers that were trained {moved}, a warning {warned}")
assert found == {
    "None": ([False, False, True], True),
    "eager": ([True, True, True], False),
    "aot_eager": ([True, True, True], False),
}, "torch does something else now"
PY
"$folder/venv/bin/python" "$folder/program.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
