#!/usr/bin/env bash
# nngeometry 0.4 beside torch 2.13.0: no Fisher matrix can be summed up for a compiled model.
#
# nngeometry differentiates the outputs one after the other with `retain_graph=True`. Full backward hooks of the layers add
# each part into one tensor. `torch.compile` traces such a hook into the compiled backward, and that tensor with it.
#
# Guess: hooks that are set before the first call are traced, and the numbers are eager's.
# Seen:  the second output's backward raises "modified by an inplace operation": the traced hook has the tensor that it
#        adds to among what the forward saved, and the first backward has changed it. So do the diagonal and the whole
#        matrix. The Kronecker-factored form needs one backward only, and has eager's trace.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 nngeometry==0.4
cat > "$folder/program.py" <<'PY'
import torch
from nngeometry.metrics import FIM
from nngeometry.object import PMatDense, PMatDiag, PMatKFAC
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(5, 4), torch.randint(3, (5,))), batch_size=5)


def trace_of(representation, prepare):
    """The trace of the Fisher matrix of a new model, or the first words of the error."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    try:
        matrix = FIM(prepare(model), data, representation, variant="classif_logits", device="cpu")
        return round(matrix.trace().item(), 4)
    except RuntimeError as error:
        return str(error).split(":")[0]


for representation in (PMatDiag, PMatDense, PMatKFAC):
    eager = trace_of(representation, lambda model: model)
    compiled = trace_of(representation, lambda model: torch.compile(model, backend="aot_eager"))
    print(f"{representation.__name__:9} eager {eager}, compiled {compiled}")
    if representation is PMatKFAC:
        assert compiled == eager
    else:
        assert "modified by an inplace operation" in str(compiled)
PY
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
