"""Models of other packages on a GPU: replays give the bits that the same code gives without recordings.

In: the recipes of gradparity's zoo whose packages are installed, each trained for so many steps that its code
is recorded and replayed. A model whose kernels add in any order does not repeat its own results, says nothing
here, and is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import retrograd
from gradparity.corpus.zoo import ZOO, ZooCorpus, recipe

pytestmark = pytest.mark.gpu

STEPS = 14
#: families that are trained by `recipe.trained` alone.
FAMILIES = ("transformers", "torchvision", "timm", "torch_geometric", "e3nn", "diffusers")
NAMES = [name for name in ZooCorpus().chunks() if name.split("/")[0] in FAMILIES]
#: they give another image to a batch norm of one value, on any device.
REFUSED = {"torchvision/detection.ssdlite320_mobilenet_v3_large"}


class Probe:
    """What a recipe asks of gradparity's probe, on the GPU. `losses` are those of the steps, and `grads` the
    last gradients."""

    seed = 0

    def __init__(self, cudagraphs: bool) -> None:
        self._cudagraphs = cudagraphs
        self.losses: list[torch.Tensor] = []
        self._model: Any = None

    def module(self, model: nn.Module) -> nn.Module:
        self._model = model.cuda()
        return self._model

    def compile(self, model: nn.Module) -> Any:
        return retrograd.compile(model, backend="eager", options={"cudagraphs": self._cudagraphs})

    def randn(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes).cuda()

    def rand(self, *sizes: int) -> torch.Tensor:
        return torch.rand(*sizes).cuda()

    def randint(self, high: int, *sizes: int) -> torch.Tensor:
        return torch.randint(high, sizes).cuda()

    def tensor(self, data: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **options).cuda()

    def training_step(self, step: Callable[..., torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        return lambda batch: step(lambda loss: loss.backward(), batch)

    def value(self, name: str, value: torch.Tensor) -> None:
        self.losses.append(value)

    def found(self) -> list[Any]:
        return [*self.losses, *(p.grad for p in self._model.parameters()), *self._model.buffers()]


def trained(name: str, cudagraphs: bool) -> list[Any]:
    torch._dynamo.reset()
    probe: Any = Probe(cudagraphs)
    torch.manual_seed(0)
    ZOO[name].body(probe)
    return probe.found()


def differing(found: list[Any], expected: list[Any]) -> list[int]:
    assert len(found) == len(expected)
    return [
        i
        for i, (one, other) in enumerate(zip(found, expected, strict=True))
        if (one is None) != (other is None)
        or (one is not None and not torch.equal(one.nan_to_num(), other.nan_to_num()))
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_replays_give_the_bits_of_the_run_without_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "STEPS", STEPS)
    expected = trained(name, cudagraphs=False)
    if differing(trained(name, cudagraphs=False), expected):
        pytest.skip("its kernels do not repeat their results")
    before = retrograd.counters["cuda_graph_replays"]
    found = trained(name, cudagraphs=True)
    assert retrograd.counters["cuda_graph_replays"] >= before + STEPS, str(retrograd.explain())
    assert not differing(found, expected)
