"""gradparity as installed from its wheel: it agrees with eager, and finds a backend that is wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.resources

import torch

import gradparity
from gradparity import corpus

assert "site-packages" in gradparity.__file__, gradparity.__file__
assert gradparity.__version__ == importlib.metadata.version("gradparity")
assert importlib.resources.files("gradparity").joinpath("py.typed").is_file()


def wrong(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
    """Computes a cosine where the program asks for a sine."""
    for node in gm.graph.nodes:
        if node.op == "call_method" and node.target == "sin":
            node.target = "cos"
    gm.recompile()
    return gm.forward


torch._dynamo.register_backend(wrong)


def program(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp()


gradparity.assert_parity(program, torch.randn(8, requires_grad=True), subject="compile:aot_eager", hooks=True)
found = ""
try:
    gradparity.assert_parity(program, torch.randn(8, requires_grad=True), subject="compile:wrong")
except AssertionError as error:
    found = str(error)
assert "DIVERGE" in found, "a wrong backend was not found"

assert len(list(corpus.programs("scenarios", match="two_branches*"))) > 1
