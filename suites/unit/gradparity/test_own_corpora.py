"""Corpora of the user's: folders, entry points of other packages, the finds of a store."""

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus import registry
from gradparity.corpus.autograd_function_db import autograd_function_db
from gradparity.corpus.folder import FolderCorpus
from gradparity.corpus.scenario import registered
from gradparity.differential import compare
from gradparity.errors import CorpusError, StoreError, UnknownNameError
from gradparity.store.store import CaseDone, Store
from gradparity.stored import FindsCorpus
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict

CPU = torch.device("cpu")
PROGRAM = '''
from gradparity import Probe, scenario

@scenario()
def {name}(p: Probe) -> None:
    """Eager squares."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (x * x).sum().backward()
'''


def folder(tmp_path: Path, **programs: str) -> FolderCorpus:
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
    return FolderCorpus(str(tmp_path))


def test_every_scenario_in_the_files_of_a_folder(tmp_path: Path) -> None:
    corpus = folder(tmp_path, one=PROGRAM.format(name="first"), two=PROGRAM.format(name="second"))
    assert corpus.chunks() == ["first", "second"]
    assert "first" not in registered()
    (program,) = corpus.programs("first", CPU, 3)
    assert (program.case, program.doc) == (Case(corpus.name, "first", None, 3), "Eager squares.")
    assert compare(program, resolve("eager"), CPU).row.verdict is Verdict.AGREE


def test_it_is_found_by_its_name(tmp_path: Path) -> None:
    folder(tmp_path, one=PROGRAM.format(name="first"))
    case = Case.parse(f"folder:{tmp_path}::first")
    assert registry.program(case, CPU).case == case


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_package", "cannot import .*ModuleNotFoundError"),
        (PROGRAM.format(name="twice") * 2, "two scenarios are called 'twice'"),
        ("def broken(", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CorpusError, match=said):
        folder(tmp_path, one=text).chunks()


def test_a_folder_that_is_not_there_and_a_name_in_two_files(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no folder of programs"):
        FolderCorpus(str(tmp_path / "nowhere")).chunks()
    text = PROGRAM.format(name="same")
    with pytest.raises(CorpusError, match=r"two programs of .* are called same"):
        folder(tmp_path, one=text, two=text).chunks()


def test_another_package_provides_one(monkeypatch) -> None:
    point = EntryPoint("theirs", f"{__name__}:provided", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group, **name: [point])
    monkeypatch.setattr(EntryPoint, "load", lambda self: autograd_function_db)
    registry.provided.cache_clear()
    try:
        assert registry.corpus("theirs").chunks() == autograd_function_db().chunks()
        with pytest.raises(UnknownNameError, match="did you mean  theirs"):
            registry.corpus("their")
    finally:
        registry.provided.cache_clear()
        registry.corpus.cache_clear()


def test_the_finds_of_a_store_are_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    case = Case("scenarios", next(iter(registered())), None, 7)
    row = Row(case.address, 7, "scenarios", "s", Verdict.DIVERGE, "values", signature="abcd")
    with Store(path) as store:
        run, _ = store.begin("digest", {}, {})
        store.add(run.id, CaseDone("unit", 0, row))
        store.add(run.id, CaseDone("unit", 1, replace(row, case="scenarios::other", verdict=Verdict.AGREE)))
    corpus = FindsCorpus(str(path))
    assert corpus.chunks() == ["abcd"]
    (program,) = corpus.programs("abcd", CPU, 0)
    assert program.case == Case(f"finds:{path}", "abcd", None, 7)
    assert program.body is registered()[case.name].body
    with pytest.raises(StoreError, match="no store at"):
        FindsCorpus(str(tmp_path / "none.db")).chunks()
