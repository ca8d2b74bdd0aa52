#!/usr/bin/env bash
# Networks with lazy layers, torch 2.13.0: if the first call is compiled, all start with the same weights.
#
# After one seed, an ensemble of three networks with an `nn.LazyLinear` is made, and each member is called once: in eager, under
# `torch.compile(backend="eager")`, and compiled after a first call in eager. Then one random number is drawn.
#
# Guess: members differ, and have eager's weights, whoever calls them first.
# Seen:  compiled, all three members have the same weights: those of eager's first member. The number drawn afterwards is
#        the first after the seed, as if no weight had been drawn. If the first call runs in eager, the members differ, and all is
#        as in eager.
# Why:   Dynamo initialises a lazy module while it traces, and sets the generators back after it has traced. The weights stay,
#        and the numbers that made them are drawn again.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
x = torch.ones(3, 5)


def ensemble(way):
    torch._dynamo.reset()
    torch.manual_seed(0)
    members = [nn.Sequential(nn.LazyLinear(4), nn.Tanh()) for _ in range(3)]
    for member in members:
        if way == "eager first":
            member(x)
        run = member if way == "eager" else torch.compile(member, backend="eager")
        run(x)
    return [member[0].weight.detach().flatten() for member in members], torch.rand(1)


def shown(way):
    weights, number = ensemble(way)
    expected, expected_number = ensemble("eager")
    return {
        "members alike": torch.equal(weights[0], weights[1]) and torch.equal(weights[1], weights[2]),
        "first as in eager": torch.equal(weights[0], expected[0]),
        "all as in eager": all(map(torch.equal, weights, expected)),
        "next number as in eager": torch.equal(number, expected_number),
    }


found = {way: [*shown(way).values()] for way in ("eager", "compiled", "eager first")}
for way, answers in found.items():
    print(f"{way}: members alike {answers[0]}, first, all, next number as in eager {answers[1:]}")
assert found == {
    "eager": [False, True, True, True],
    "compiled": [True, True, False, False],
    "eager first": [False, True, True, True],
}, "torch does something else now"
assert torch.equal(ensemble("compiled")[1], (torch.manual_seed(0), torch.rand(1))[1]), "the numbers are not drawn again"
PY
"$folder/venv/bin/python" "$folder/program.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
