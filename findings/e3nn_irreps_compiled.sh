#!/usr/bin/env bash
# e3nn 0.6.0 beside torch 2.13.0: a compiled forward that reads the irreps of its module raises an error without words.
#
# An irrep of e3nn is a tuple of a degree and a parity. To forbid what makes no sense for it, its class raises
# NotImplementedError when somebody asks for its length. A loop over `(multiplicity, irrep)` never asks.
#
# Guess: the loop is unrolled, since all of it is constant, or Dynamo breaks the graph at the class that it does not know.
# Seen:  the loop is traced, and the graph is right. After that Dynamo guards the irrep as it guards every tuple, by its
#        length: building the guards fails, which is an internal error whose only word is NotImplementedError. There is no
#        fallback to Python. A forward that loops over plain numbers, taken from the irreps in `__init__`, is compiled.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 e3nn==0.6.0
cat > "$folder/program.py" <<'PY'
import torch
from e3nn import o3


class Scale(torch.nn.Module):
    """Multiply features by the sizes of their irreps."""

    def __init__(self, as_numbers):
        super().__init__()
        irreps = o3.Irreps("2x0e + 1x1o")
        self.parts = [(mul, ir.dim) for mul, ir in irreps] if as_numbers else irreps
        self.as_numbers = as_numbers

    def forward(self, x):
        for mul, part in self.parts:
            x = x * (mul * (part if self.as_numbers else part.dim))
        return x


def result(as_numbers, prepare):
    torch._dynamo.reset()
    try:
        return prepare(Scale(as_numbers))(torch.ones(2)).tolist()
    except torch._dynamo.exc.InternalTorchDynamoError as error:
        return str(error).strip()


def compiled(module):
    return torch.compile(module, backend="eager")


for as_numbers in (False, True):
    eager, found = result(as_numbers, lambda module: module), result(as_numbers, compiled)
    print(f"reads {'numbers' if as_numbers else 'irreps':7}  eager {eager}, compiled: {found}")
    assert found == (eager if as_numbers else "NotImplementedError:")
PY
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
