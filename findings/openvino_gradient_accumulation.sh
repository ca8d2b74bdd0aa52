#!/usr/bin/env bash
# openvino 2026.4.1 beside torch 2.13.0: gradients of two batches do not add up; the last batch counts twice.
#
# `torch.compile(backend="openvino", options={"aot_autograd": True})` is OpenVINO's way to train with `torch.compile`. A script
# that accumulates gradients calls `backward` for several batches before the optimizer steps.
#
# Guess: `.grad` after two batches is the sum of both gradients, as in eager.
# Seen:  after the first batch `.grad` is right. The second backward writes its results into the memory of the first, where
#        `.grad` lies by then, and is added to that: `.grad` is twice the second gradient. If `.grad` is set to None
#        after each batch, both are right.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 openvino==2026.4.1 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch
from openvino.frontend.pytorch.torchdynamo.backend import openvino


def training(graph, inputs):
    return openvino(graph, inputs, options={"aot_autograd": True})


def gradients(backend, accumulate):
    """`.grad` after each of two batches."""
    torch._dynamo.reset()
    weight, seen = torch.tensor([1.0, 2.0], requires_grad=True), []
    run = torch.compile(lambda batch: (batch * weight.sin()).sum(), backend=backend)
    for batch in (torch.tensor([1.0, 1.0]), torch.tensor([3.0, 5.0])):
        run(batch).backward()
        seen.append([round(value, 3) for value in weight.grad.tolist()])
        if not accumulate:
            weight.grad = None
    return seen


for accumulate in (False, True):
    want, got = gradients("eager", accumulate), gradients(training, accumulate)
    print(f"accumulate: {accumulate!s:5}  eager {want}  openvino {got}")
    assert got[0] == want[0]
    if accumulate:
        alone = gradients("eager", False)[1]
        assert got[1] == [round(2 * value, 3) for value in alone] != want[1]
    else:
        assert got == want
PY
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
