#!/usr/bin/env bash
# torch 2.13.0: which hooks on a parameter let the parameter go when nobody holds it any more.
#
# A program makes two parameters, adds a hook in one of six ways, drops every name, and collects garbage. The ways: a tensor hook
# that refers to its parameter; a post-accumulate hook that refers to nothing; the same with a reference to its parameter; optimizer
# steps in backward as the PyTorch tutorial writes them (a dictionary from parameter to optimizer, read by the hook); a hook of
# several tensors that refers to nothing; the same with its handle removed at the end.
#
# Guess: all six parameters go; a test of ours expected that of generated programs. `gc` collects the cycle of a tensor and its
#        hook, and hooks without references make none.
# Seen:  three go, and three stay for the life of the process: the post-accumulate hook that refers to its parameter, the
#        optimizers in backward, and the hook of several tensors, although it refers to nothing.
# Why:   Python's collector sees what a tensor's own hooks hold, but not what its post-accumulate hooks hold. A hook of several
#        tensors keeps a list of the nodes that accumulate into them; each node holds its parameter, in C++.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import gc
import weakref

import torch
from torch.autograd.graph import register_multi_grad_hook


def tensor_hook(x, y):
    x.register_hook(lambda grad: print(x.shape) if grad is None else None)


def accumulate_hook(x, y):
    x.register_post_accumulate_grad_hook(lambda parameter: None)


def accumulate_hook_with_its_parameter(x, y):
    x.register_post_accumulate_grad_hook(lambda parameter: None if parameter is x else print("another"))


def optimizers_in_backward(x, y):
    optimizers = {parameter: torch.optim.SGD([parameter]) for parameter in (x, y)}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in (x, y):
        parameter.register_post_accumulate_grad_hook(step)


def hook_of_several(x, y):
    register_multi_grad_hook((x, y), lambda grads: None)


def hook_of_several_removed(x, y):
    register_multi_grad_hook((x, y), lambda grads: None).remove()


def alive(add):
    x, y = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    add(x, y)
    seen = weakref.ref(x)
    del x, y
    gc.collect()
    return seen() is not None


ways = {
    tensor_hook: False,
    accumulate_hook: False,
    accumulate_hook_with_its_parameter: True,
    optimizers_in_backward: True,
    hook_of_several: True,
    hook_of_several_removed: False,
}
seen = {way: alive(way) for way in ways}
for way, stays in seen.items():
    print(f"{way.__name__:36} {'stays' if stays else 'goes'}")
raise SystemExit(seen != ways)
PY
"$folder/venv/bin/python" "$folder/program.py"
