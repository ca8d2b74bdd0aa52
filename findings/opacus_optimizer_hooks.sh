#!/usr/bin/env bash
# opacus 1.6.0 beside torch 2.13.0: no hook can be set on its optimizer, which is an Optimizer; hooks of all optimizers run.
#
# `DPOptimizer` is a subclass of `torch.optim.Optimizer` around another optimizer. Training code sets hooks on optimizers: to
# count steps, to average weights after each, to change a state dictionary before it is saved.
#
# Guess: the four kinds of hooks of an optimizer work on the wrapper, since it is an optimizer and has the methods.
# Seen:  each of the four methods raises AttributeError: the wrapper has not called `Optimizer.__init__`, which makes the
#        dictionaries that they write to. A hook for the steps of all optimizers is called once a step, with the optimizer
#        inside and not the one that the program calls. Hooks set on the inner one before it is wrapped run.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 opacus==1.6.0
cat > "$folder/program.py" <<'PY'
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

KINDS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post")
model = GradSampleModule(torch.nn.Linear(2, 1))
inner, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
inner.register_step_post_hook(lambda *_: seen.append("hook of the inner optimizer"))
outer = DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=3)
assert isinstance(outer, torch.optim.Optimizer)


def can_be_set(kind):
    try:
        getattr(outer, f"register_{kind}_hook")(lambda *_: None)
    except AttributeError as error:
        print(f"{kind:15} {error}")
        return False
    return True


assert not any(map(can_be_set, KINDS))
register_optimizer_step_post_hook(lambda one, *_: seen.append(f"hook of all: {type(one).__name__}"))
model(torch.ones(3, 2)).mean().backward()
outer.step()
print(seen)
assert sorted(seen) == ["hook of all: SGD", "hook of the inner optimizer"]
PY
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
