"""Backends of users: under which modes they are called, and what becomes of wrong results.

What their code returns is looked at when it first runs; if it is wrong, eager goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd
import retrograd.aot
from retrograd.backends.base import GraphKind
from retrograd.backends.registry import InductorBackend, find_backend
from retrograd.errors import BackendError
from retrograd.graph.fx import lazy_graph

Change = Callable[[list[Any]], list[Any]]

#: what a faulty backend makes of right results.
FAULTS: dict[str, Change] = {
    "too_few": lambda results: results[:-1],
    "too_many": lambda results: [*results, results[0]],
    "another_shape": lambda results: [r.flatten() if isinstance(r, Tensor) else r for r in results],
    "another_dtype": lambda results: [
        r.double() if isinstance(r, Tensor) and r.is_floating_point() else r for r in results
    ],
}


def faulty(change: Change) -> Callable[..., Any]:
    """A backend that runs the graph and changes its results."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: change(list(gm(*args)))

    return backend


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def losses(way: str, backend: Any, steps: int = 3) -> list[float]:
    """Of some steps of training."""
    net, x = model(), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    call: Any = net
    if way == "aot":
        call = retrograd.aot.module(net, backend=backend)
    elif way == "compile":
        call = retrograd.compile(net, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(x).square().mean()
        if way == "live":
            with retrograd.compiled_autograd(backend=backend):
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", ["live", "aot", "compile"])
def test_eager_goes_on_where_results_are_wrong(way: str, fault: str) -> None:
    retrograd.reset()
    torch._dynamo.reset()
    assert losses(way, faulty(FAULTS[fault])) == losses("eager", None)


def graph_of(fn: Callable[[Tensor], Any]) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn)(torch.ones(2, 3))


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("way", ["live", "aot", "compile"])
def test_a_backend_that_changes_its_inputs_is_an_error(way: str, raises: bool) -> None:
    """Also where nothing is strict: what eager would need is lost."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = gm(*args)
            for value in args:
                value.detach().mul_(2)
            if raises:
                raise RuntimeError("device lost")
            return results

        return run

    with pytest.raises(retrograd.InputsChangedError, match="changed input 0 in place"):
        losses(way, backend)


def test_the_error_names_the_result() -> None:
    gm = graph_of(lambda x: (x * 2, x.sum()))
    code = find_backend(faulty(FAULTS["another_shape"])).compile(gm, [torch.ones(2, 3)])
    with pytest.raises(BackendError, match=r"result 0 of backend 'backend' is torch.float32 \[6\]"):
        code([torch.ones(2, 3)])


def test_right_results_are_looked_at_once() -> None:
    gm, seen = graph_of(lambda x: (x * 2,)), []

    def once_right(results: list[Any]) -> list[Any]:
        seen.append(1)
        return results if len(seen) == 1 else [results[0].flatten()]

    code = find_backend(faulty(once_right)).compile(gm, [torch.ones(2, 3)])
    assert [code([torch.ones(2, 3)])[0].shape for _ in range(2)] == [(2, 3), (6,)]


@pytest.mark.parametrize("way", ["live", "aot", "compile"])
def test_graphs_are_lowered_and_run_without_autocast(way: str) -> None:
    seen = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append(("run", torch.is_autocast_enabled("cpu")))
            return gm(*args)

        seen.append(("lowered", torch.is_autocast_enabled("cpu")))
        return run

    retrograd.reset()
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        losses(way, backend)
    assert set(seen) == {("lowered", False), ("run", False)}


def settings_for_parts_of(follow: int) -> dict[str, Any]:
    """Of the Inductor that compiles parts of a convolution with `follow` calls after it."""
    graph = torch.fx.Graph()
    image, weight = graph.placeholder("image"), graph.placeholder("weight")
    image.meta["val"], weight.meta["val"] = torch.empty(2, 96, 6, 6), torch.empty(128, 96, 3, 3)
    aten = torch.ops.aten
    made = graph.call_function(
        aten.convolution.default, (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    )
    made.meta["val"] = torch.empty(2, 128, 4, 4)
    for _ in range(follow):
        made = graph.call_function(aten.tanh.default, (made,))
        made.meta["val"] = torch.empty(2, 128, 4, 4)
    graph.output((made,))
    found = find_backend("inductor").for_parts_of(lazy_graph(torch.fx.GraphModule({}, graph)), GraphKind())
    assert isinstance(found, InductorBackend)
    return found.settings


def test_parts_leave_the_memory_format_of_a_convolution_where_the_whole_would() -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # as on a GPU: there is a choice
        assert settings_for_parts_of(2) == {}
        assert settings_for_parts_of(400) == {"layout_optimization": False}
