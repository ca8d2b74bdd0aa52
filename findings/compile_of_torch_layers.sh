#!/usr/bin/env bash
# torch 2.13.0: Module.compile() on layers that torch itself defines.
#
# Five modules are compiled in two ways with a backend that counts its graphs, and called three times: `module.compile(backend=...)`
# and `torch.compile(module, backend=...)`. The modules: one linear layer, a Sequential of two layers, a transformer encoder
# layer, a class of the program's own with a layer inside, and a Sequential with that class inside.
#
# Guess: each is one graph in both ways; the documents call the first a shorthand for the second.
# Seen:  `torch.compile` makes one graph of each. `compile()` makes none of the three modules that torch defines: they run as
#        before, without a warning. Of the other two it compiles the program's own forward only.
# Why:   Dynamo leaves frames of torch's own files alone when they come first, and traces them only inside of another frame.
#        `torch.compile` of a module begins with a frame made for that purpose; `compile()` begins with the module's own call.
#        Users have reported it as pytorch#150915.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch
from torch import nn


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x).relu()


modules = {
    "linear": lambda: nn.Linear(2, 2),
    "sequential": lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    "encoder layer": lambda: nn.TransformerEncoderLayer(2, 1, 4, batch_first=True),
    "own": Own,
    "sequential with own": lambda: nn.Sequential(Own(), nn.ReLU()),
}


def graphs(make, in_place):
    """How many calls each graph has."""
    torch._dynamo.reset()
    sizes = []

    def backend(graph, inputs):
        sizes.append(sum(node.op == "call_function" or node.op == "call_method" for node in graph.graph.nodes))
        return graph

    module = make()
    if in_place:
        module.compile(backend=backend)
    called = module if in_place else torch.compile(module, backend=backend)
    for _ in range(3):
        called(torch.ones(1, 3, 2)).sum().backward()
    return sizes


seen = {name: (len(graphs(make, True)), len(graphs(make, False))) for name, make in modules.items()}
for name, (in_place, outside) in seen.items():
    print(f"{name:20} module.compile(): {in_place} graphs   torch.compile(module): {outside}")
expected = dict.fromkeys(["linear", "sequential", "encoder layer"], (0, 1)) | dict.fromkeys(list(modules)[3:], (1, 1))
inside, whole = graphs(modules["sequential with own"], True), graphs(modules["sequential with own"], False)
print(f"sequential with own: {inside[0]} calls in the graph of compile(), {whole[0]} in the other")
raise SystemExit(seen != expected or inside >= whole)
PY
"$folder/venv/bin/python" "$folder/program.py"
