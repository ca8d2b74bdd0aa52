#!/usr/bin/env bash
# torch-pruning 1.6.1 beside torch 2.13.0: a compiled model is pruned into one that cannot run.
#
# torch-pruning finds out which layers depend on each other by walking `grad_fn` from the output. The graph of a
# compiled forward is one node, so every operation between the layers is missing from the walk. The layers themselves
# are still found, through their forward hooks.
#
# Guess: an error, or no dependencies at all, so that only one layer is pruned.
# Seen:  no error and no warning. The layers are pruned together, but the concatenation in front of the last one is
#        unknown, so that it loses one input feature where it should lose two. The next call raises a shape error.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 torch-pruning==1.6.1
cat > "$folder/program.py" <<'PY'
import torch
import torch_pruning


class TwoHalves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.last = torch.nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(torch.cat([hidden, hidden * 2], 1))


def features_left(prepare):
    """The input features of the last layer after one output feature of the first was pruned."""
    model, x = TwoHalves(), torch.randn(2, 4)
    graph = torch_pruning.DependencyGraph().build_dependency(prepare(model), example_inputs=x)
    graph.get_pruning_group(model.first, torch_pruning.prune_linear_out_channels, idxs=[1]).prune()
    try:
        model(x)
    except RuntimeError as error:
        print("  the pruned model raises:", error)
    return model.last.in_features


eager = features_left(lambda model: model)
compiled = features_left(lambda model: torch.compile(model, backend="aot_eager"))
print(f"input features of the last layer, of 16: eager {eager}, compiled {compiled}")
assert (eager, compiled) == (14, 15)
PY
"$folder/venv/bin/python" "$folder/program.py"
