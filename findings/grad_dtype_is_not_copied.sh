#!/usr/bin/env bash
# torch 2.13.0: a parameter's `grad_dtype` survives a cast of its module, and no copy of it; AdamW has no use for it.
#
# `grad_dtype = torch.float32` on a bfloat16 weight asks autograd for gradients in float32. Training code sets it once, and
# then copies models for averaging, saves them, and moves them.
#
# Guess: it goes where `requires_grad` goes, and every optimizer takes such gradients, since autograd makes them.
# Seen:  `copy.deepcopy`, `pickle` and `torch.save` give a weight whose gradients are bfloat16 again, without a word, though
#        they keep `requires_grad`. `Module.to` keeps it, also over float32 and back. SGD, Adagrad and RMSprop step with a
#        float32 gradient on a bfloat16 weight; AdamW raises in each of its three implementations.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import copy
import io
import pickle

import torch


def saved(parameter):
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file)


def new_layer():
    layer = torch.nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    return layer


def grad_dtype_after_backward(weight):
    (weight.float() * 1.0001).sum().backward()
    return weight.grad.dtype


copies = {"deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one)), "torch.save": saved}
for name, copied in copies.items():
    weight = copied(new_layer().weight)
    print(f"{name:12} requires grad: {weight.requires_grad}, gradient {grad_dtype_after_backward(weight)}")
    assert weight.requires_grad and weight.grad.dtype is torch.bfloat16

kept = grad_dtype_after_backward(new_layer().float().bfloat16().weight)
print(f"{'casts':12} gradient {kept}")
assert kept is torch.float32


def steps(make):
    weight = new_layer().weight
    grad_dtype_after_backward(weight)
    try:
        make([weight]).step()
    except RuntimeError:
        return False
    return True


for optimizer in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.AdamW):
    options = [{"foreach": False}, {"foreach": True}]
    options += [{"fused": True}] if optimizer is torch.optim.AdamW else []
    taken = [steps(lambda params, given=given: optimizer(params, lr=0.1, **given)) for given in options]
    print(f"{optimizer.__name__:12} steps with it: {taken}")
    assert set(taken) == {optimizer is not torch.optim.AdamW}
PY
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
