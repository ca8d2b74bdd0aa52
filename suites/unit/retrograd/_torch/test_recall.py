"""A trace that recalls calls makes the graph that it makes without: text, names, values, memory, notes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from retrograd import aot
from retrograd._torch.trace import graph_tracer, recall


def _form(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_form(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shown = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
    return (type(value), *shown, value.requires_grad, value.untyped_storage().nbytes())


def _told(graph: fx.Graph) -> list[Any]:
    """All that a graph says, with memory and sequence numbers counted from its beginning."""
    memory: dict[int, int] = {}
    first = min((node.meta["seq_nr"] for node in graph.nodes if "seq_nr" in node.meta), default=0)
    told: list[Any] = [str(graph)]
    for node in graph.nodes:
        value, meta = node.meta.get("val"), dict(node.meta)
        shares = None
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            shares = memory.setdefault(value.untyped_storage()._cdata, len(memory))
        meta["seq_nr"] = meta.get("seq_nr", first) - first
        meta.pop("val", None)
        notes = [(key, re.sub(r"0x[0-9a-f]+", "", repr(meta[key]))) for key in sorted(meta)]
        told.append((node.name, _form(value), shares, notes))
    return told


def _captured(make: Callable[[], tuple[Any, ...]]) -> list[Any]:
    torch.manual_seed(0)
    fn, *args = make()
    return _told(aot.capture(aot.create_state(fn, args)).gm.graph)


def _layers() -> tuple[Any, ...]:
    one = [nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5)]
    return nn.Sequential(*one, *[nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5)]), _x(3, 4)


def _x(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).view(sizes).to(dtype).requires_grad_()


def _views_changed(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x.clone()
        x[1:].mul_(2)
        x.t()[0].add_(1)
        x = x.transpose(0, 1)
    return x


def _twice_the_same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y + x * x + y * x + y * y + (x + y) * (x + y)


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right, other = x[0], x[1], y.clone()
    return left * right + left * other[0] + left.view(2, 2).expand(2, 2, 2).sum(0).view(4) * right


def _like_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x * 0.0, x * -0.0, x * 1, x * True, x * 1.0, x * float("nan"), x + 1, x + 1.0])


def _defaults_changed(x: torch.Tensor) -> torch.Tensor:
    counts = (x > 0).to(torch.int64)
    before = torch.get_default_dtype()
    one = counts / 2
    torch.set_default_dtype(torch.float64)
    try:
        other = counts / 2
    finally:
        torch.set_default_dtype(before)
    return x * one + x * other


def _several_results(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        low, high = x.split(2, dim=1)
        values, _places = torch.sort(low * high, dim=1)
        mean, spread = torch.var_mean(values, dim=1, keepdim=True)
        x = torch.cat([values * spread, low + mean], 1)
    return x


def _complex(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = torch.view_as_real(torch.view_as_complex(x).conj() * 1j).neg()
    return x


def _draws(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5) + F.dropout(x, 0.5) + torch.randn_like(x) + torch.randn_like(x)


def _casts(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(F.linear(x, x), x.detach()).sum()


def _of_data(x: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([2.0, 3.0])
    return x * table[0] + x * table[1] + torch.full_like(x, 2.0) + torch.full_like(x, 2.0)


PROGRAMS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "layers": _layers,
    "views_changed": lambda: (_views_changed, _x(3, 3)),
    "twice_the_same": lambda: (_twice_the_same, _x(3), _x(3)),
    "share_memory": lambda: (_share_memory, _x(2, 4), _x(2, 4)),
    "like_numbers": lambda: (_like_numbers, _x(3)),
    "defaults_changed": lambda: (_defaults_changed, _x(3)),
    "several_results": lambda: (_several_results, _x(2, 4)),
    "complex": lambda: (_complex, _x(3, 2)),
    "draws": lambda: (_draws, _x(3)),
    "casts": lambda: (_casts, _x(3, 3)),
    "of_data": lambda: (_of_data, _x(3)),
    "batch_norm": lambda: (nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3))), _x(3, 4)),
    "convolutions": lambda: (
        nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))),
        _x(1, 2, 4, 4),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_is_the_same_without_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _captured(PROGRAMS[name])  # torch's cache of fake results gives some of them less memory than they had
    with_memory = _captured(PROGRAMS[name])
    monkeypatch.setattr(graph_tracer, "remember_calls", lambda mode: None)
    assert with_memory == _captured(PROGRAMS[name])


@pytest.mark.parametrize("name", ["layers", "views_changed", "several_results", "batch_norm", "convolutions"])
def test_equal_layers_are_recalled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would say nothing."""
    recalled = []
    write = recall._recalled
    monkeypatch.setattr(recall, "_recalled", lambda *args: recalled.append(args) or write(*args))
    _captured(PROGRAMS[name])
    assert len(recalled) > 3


def test_symbolic_sizes_are_asked_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "_recalled", lambda *args: pytest.fail("a call with symbols was recalled"))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.sin() * x.sin()

    function = aot.function(fn, backend="aten", dynamic=True)
    for size in (3, 4, 5):
        x = torch.rand(size, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        function(x).sum().backward()
        fn(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)
