#!/usr/bin/env bash
# torch 2.13.0: parameters that are slices of one flat buffer, and a view that is older than an optimizer's step.
#
# A program keeps all its parameters in one buffer, takes a view of one parameter (`unsqueeze`, as for a product of matrices), makes
# a step of SGD, and differentiates the sum of the view. It makes the parameter in six ways: a copy with memory of its own; the slice
# `buffer[2:5].requires_grad_()`; the same of one piece of `split`; `nn.Parameter` of the slice; `detach()` of the slice; a parameter
# whose `.data` is the slice.
#
# Guess: the gradient arrives in all six, since all are leaves with equal values. A test of ours expected that of a generated program.
# Seen:  it arrives in four. With the slice itself the backward runs without a word, and the parameter's `.grad` stays None. With a
#        piece of `split` it raises an error about views.
# Why:   the step changes the parameter in place, so the view's node is made anew, and leads to the base of all views: here that is the
#        buffer, which needs no gradient, and not the parameter. The other ways make parameters that are not views of the buffer.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch
from torch import nn


def copy(buffer):
    return buffer[2:5].clone().requires_grad_()


def slice_of_buffer(buffer):
    return buffer[2:5].requires_grad_()


def piece_of_split(buffer):
    return buffer.split(3)[1].requires_grad_()


def parameter_of_slice(buffer):
    return nn.Parameter(buffer[2:5])


def detached_slice(buffer):
    return buffer[2:5].detach().requires_grad_()


def data_is_slice(buffer):
    parameter = nn.Parameter(torch.empty(3))
    parameter.data = buffer[2:5]
    return parameter


def outcome(make):
    parameter = make(torch.arange(6.0))
    row = parameter.unsqueeze(0)
    parameter.grad = torch.ones(3)
    torch.optim.SGD([parameter], lr=0.1).step()
    parameter.grad = None
    try:
        row.sum().backward()
    except RuntimeError:
        return "raises"
    return "is lost" if parameter.grad is None else "arrives"


ways = {
    copy: "arrives",
    slice_of_buffer: "is lost",
    piece_of_split: "raises",
    parameter_of_slice: "arrives",
    detached_slice: "arrives",
    data_is_slice: "arrives",
}
seen = {make: outcome(make) for make in ways}
for make, what in seen.items():
    print(f"{make.__name__:20} the gradient {what}" if what != "raises" else f"{make.__name__:20} an error is raised")
raise SystemExit(seen != ways)
PY
"$folder/venv/bin/python" "$folder/program.py"
