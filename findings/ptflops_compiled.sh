#!/usr/bin/env bash
# ptflops 0.7.5 beside torch 2.13.0: what it counts for a compiled model depends on what was compiled before.
#
# ptflops replaces functions of torch by wrappers while it counts. Dynamo asks torch for its list of functions when it first
# traces, and keeps the list.
#
# Guess: hooks of the layers are not called in a compiled model, so that the count is too small.
# Seen:  in a process in which nothing was compiled yet, Dynamo makes its list from the wrappers and fails, and ptflops
#        says that the count is None. If anything was compiled before, the same call counts more than twice eager's
#        operations, without a word.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 ptflops==0.7.5
cat > "$folder/program.py" <<'PY'
import sys

import torch
from ptflops import get_model_complexity_info


def counted(prepare):
    """The operations that ptflops counts in one call of a small model."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    settings = {"as_strings": False, "print_per_layer_stat": False, "backend": "pytorch"}
    return get_model_complexity_info(prepare(model), (4,), ost=sys.stderr, **settings)[0]


def compiled(model):
    return torch.compile(model, backend="eager")


first = counted(compiled)
torch._dynamo.reset()
torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
later, eager = counted(compiled), counted(lambda model: model)
print(f"eager {eager}, compiled first of all {first}, compiled later {later}")
assert first is None
assert later > 2 * eager
PY
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
