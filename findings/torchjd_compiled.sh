#!/usr/bin/env bash
# torchjd 0.18.0 beside torch 2.13.0: a compiled model can be trained by its Jacobian, one row at a time only.
#
# torchjd differentiates several losses at once: `autojac.backward` makes a row of the Jacobian for each. By default all
# rows come from one `autograd.grad` under vmap; `parallel_chunk_size` says how many rows one such call makes.
#
# Guess: no way works, or numbers are wrong, since every row runs the compiled backward again over what it saved.
# Seen:  by default torch refuses to call a compiled backward under vmap. The advice of its message, to put vmap inside
#        `torch.compile`, cannot be followed: the vmap is torchjd's. With `parallel_chunk_size=1` torchjd calls no vmap, and
#        the Jacobian is eager's to the bit.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 torchjd==0.18.0
cat > "$folder/program.py" <<'PY'
import torch
from torchjd import autojac


def rows(prepare, parallel_chunk_size):
    """The rows of the Jacobian of two losses, of all parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    found = prepare(model)(torch.randn(5, 3))
    losses = [found.square().mean(), (found[:, 0] - found[:, 1]).abs().mean()]
    try:
        autojac.backward(losses, parallel_chunk_size=parallel_chunk_size)
    except RuntimeError as error:
        return str(error).split(",")[0]
    return torch.cat([parameter.jac.flatten(1) for parameter in model.parameters()], 1)


def compiled(model):
    return torch.compile(model, backend="aot_eager")


for chunk in (None, 1):
    eager, found = rows(lambda model: model, chunk), rows(compiled, chunk)
    print(f"parallel_chunk_size={chunk!s:4}  eager {tuple(eager.shape)}, compiled:", end=" ")
    print(found if isinstance(found, str) else f"{tuple(found.shape)}, equal: {torch.equal(found, eager)}")
    if chunk is None:
        assert "call a compiled backward function within vmap" in found
    else:
        assert torch.equal(found, eager)
PY
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
