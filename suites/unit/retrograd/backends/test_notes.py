"""Notes on disk of what Inductor answered an earlier process: which are found, and which must not be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._inductor.codecache import FxGraphCache
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.backends.base import SEGMENT, Boxed, GraphKind
from retrograd.backends.inductor import chooses_layouts
from retrograd.backends.inductor.notes import Note
from retrograd.backends.registry import AtenBackend, InductorBackend
from retrograd.graph.fx import lazy_graph
from retrograd.graph.lazy import LazyGraph
from unit.retrograd.aot.second_process import in_a_new_process


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of notes; empty."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield tmp_path / "retrograd"
    torch._dynamo.reset()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Inductor's keys that were made anew."""
    made, make = [], FxGraphCache.prepare_key

    def noted(*args: Any) -> Any:
        found = make(*args)
        made.append(found[0][0])
        return found

    monkeypatch.setattr(FxGraphCache, "prepare_key", noted)
    return made


def program(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().sum()


def notes(folder: Path) -> list[Path]:
    """Their files."""
    return sorted(folder.glob("*/*.note"))


def test_code_is_found_without_inductors_key(folder: Path, keys: list[str]) -> None:
    first = in_a_new_process(program)
    assert len(keys) == 2
    assert sorted(note.read_text() for note in notes(folder)) == sorted(keys)
    assert all(map(torch.equal, in_a_new_process(program), first))
    assert len(keys) == 2

    for note in notes(folder):  # a damaged one, or one of code that is gone
        note.write_text("../secret" if note == notes(folder)[0] else "f" + "0" * 51)
    assert all(map(torch.equal, in_a_new_process(program), first))
    assert keys[2:] == keys[:2]
    assert sorted(note.read_text() for note in notes(folder)) == sorted(keys[:2])

    with torch._inductor.config.patch(comment_origin=True):
        assert all(map(torch.equal, in_a_new_process(program), first))
    assert len(set(keys)) == 4


def test_a_note_is_of_one_graph_under_one_environment(folder: Path) -> None:
    Note("a graph", True, None).write("f0123")
    assert Note("a graph", True, None).read() == "f0123"
    assert Note("a graph", True, 1).read() is None
    assert Note("another graph", True, None).read() is None
    with torch._inductor.config.patch(comment_origin=True):
        assert Note("a graph", True, None).read() is None
    with torch.autograd.graph.save_on_cpu():  # hooks are on
        assert Note("a graph", True, None).read() is None
    Note(None).write("f0123")
    Note("a graph").write(None)
    assert Note(None).read() is Note("a graph").read() is None
    assert len(notes(folder)) == 1


def test_nothing_is_noted_where_nothing_is_kept(folder: Path) -> None:
    with torch._inductor.config.patch(force_disable_caches=True):
        Note("a graph").write("f0123")
    folder.parent.chmod(0o777)
    Note("a graph").write("f0123")
    assert not folder.exists()
    folder.parent.chmod(0o700)
    folder.write_text("in the way")
    Note("a graph").write("f0123")
    assert Note("a graph").read() is None


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The names of graphs that Inductor would compile; they are interpreted."""
    found = list[str | None]()

    def interpreted(backend: InductorBackend, gm: Any, inputs: Any, half: GraphKind = SEGMENT) -> Boxed:
        found.append(half.known_as)
        return AtenBackend().compile(gm, inputs, half)

    monkeypatch.setattr(InductorBackend, "compile", interpreted)
    return found


def test_another_layout_of_what_is_saved_is_another_graph(
    names: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def squared(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x.t()).softmax(-1) @ x).sum()

    first = in_a_new_process(squared)
    assert len(set(names)) == 2
    assert None not in names
    assert all(map(torch.equal, in_a_new_process(squared), first))
    assert names[2:] == names[:2]

    def lies_otherwise(fake: Any, value: Any) -> Any:
        with fake.fake_mode:
            return fake.mT.contiguous().mT if fake.dim() == 2 else fake

    monkeypatch.setattr("retrograd.aot.run.region.laid_out_like", lies_otherwise)
    assert all(map(torch.equal, in_a_new_process(squared), first))
    assert names[4:] == [names[0], None]


@pytest.mark.parametrize("groups", [1, 64])
def test_whether_layouts_are_chosen_is_known_without_the_graph(groups: int) -> None:
    def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.convolution(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], groups)

    x, weight = torch.randn(2, 64, 8, 8), torch.randn(64, 64 // groups, 3, 3)
    mode = FakeTensorMode()
    gm = make_fx(layers)(mode.from_tensor(x), mode.from_tensor(weight))
    graph = lazy_graph(gm)
    unread = LazyGraph(lambda: pytest.fail("it is read"), lambda: graph.summary)
    graph.known_as = unread.known_as = "a graph"
    asked = chooses_layouts(graph, is_inference=False)
    assert asked is GraphLowering.decide_layout_opt(gm, is_inference=False)
    assert chooses_layouts(unread, is_inference=False) is asked
    with pytest.raises(pytest.fail.Exception, match="it is read"):
        chooses_layouts(unread, is_inference=True)
