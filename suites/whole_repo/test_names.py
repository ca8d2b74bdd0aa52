"""What documents and docstrings name exists: modules, functions, files, nox sessions.

In: the backticked words of README, CONTRIBUTING, ARCHITECTURE and the pages of `docs`, and of retrograd's
docstrings. A name in capitals stands for one that the reader chooses.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOMES = {
    name: ROOT / home / name
    for name, home in (("retrograd", "packages/retrograd/src"), ("gradparity", "harness/src"))
}
#: what a path in a document may be relative to, besides the document.
BASES = (ROOT, *HOMES.values(), ROOT / "suites")

#: modules whose names are also what people call a value: only with their package before them are they meant.
VALUES = {"case", "config", "graph", "outcome", "probe", "report", "signature"}
#: what looks like a module and is none: a group of entry points.
NO_MODULES = {"gradparity.corpora"}

QUOTED = re.compile(r"(?<!`)`{1,2}([^`\n]+)`{1,2}(?!`)")
DOTTED = re.compile(r"^_*[A-Za-z]\w*(?:\.\w+)+$")
PATH = re.compile(r"^\.?[\w*-]+(?:/[\w.*-]+)*/?$|^[\w*-]+\.(?:py|md|toml|txt|json|yml)$")
SESSIONS = re.compile(r"nox (?:-R )?-s ((?:\"[^\"]+\"|[a-z_]+)(?: [a-z_]+)*)")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)")


def documents(root: Path) -> list[Path]:
    """The documents that people read, but for the list of changes: it names what is gone."""
    pages = [path for path in (root / "docs").rglob("*.md") if "findings" not in path.parts]
    tops = [root / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
    return [*tops, root / "packages/retrograd/README.md", root / "harness/README.md", *sorted(pages)]


def quoted(text: str) -> list[str]:
    """The words in backticks, without call brackets; blocks of code are left out."""
    return [
        word.strip().split("(")[0] for word in QUOTED.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]


@cache
def modules(package: str) -> frozenset[str]:
    """The names of a package's own modules and sub-packages."""
    return frozenset(path.stem for path in HOMES[package].iterdir() if not path.name.startswith("__"))


def full_name(word: str) -> str | None:
    """A dotted name from its package on; None if it is no name of ours."""
    first = word.split(".")[0]
    if word in NO_MODULES or first in VALUES:
        return None
    if first in HOMES:
        return word
    return next((f"{package}.{word}" for package in HOMES if first in modules(package)), None)


@cache
def is_there(name: str) -> bool:
    """Whether a dotted name can be imported, or is an attribute of what can be."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part) and part not in getattr(found, "__dataclass_fields__", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


def missing_names(text: str) -> Iterator[str]:
    """Dotted names of ours that do not exist."""
    for word in quoted(text):
        if DOTTED.match(word) and not word.endswith(
            (".py", ".md", ".toml", ".txt", ".json", ".yml", ".html")
        ):
            name = full_name(word)
            if name is not None and not is_there(name):
                yield word


def stands_for_another(part: str) -> bool:
    return Path(part).stem.isupper() and len(Path(part).stem) > 1


def missing_paths(text: str, document: Path) -> Iterator[str]:
    """Files and folders that do not exist, as far as a word can only be meant so."""
    words = [word for word in quoted(text) if PATH.match(word) and ("/" in word or "." in word[1:])]
    for word in [*words, *LINK.findall(text)]:
        parts = [part for part in word.strip("/").split("/") if not stands_for_another(part)]
        place = "/".join(parts)
        if "*" in place or word.startswith("repro_") or not place or place.removeprefix("../") in MADE:
            continue
        nearby = any((base / place).exists() for base in (document.parent, *BASES))
        anywhere = "/" not in place and any(next(base.rglob(place), None) for base in BASES[1:])
        is_ours = any((base / parts[0]).exists() for base in (document.parent, *BASES)) or "." in parts[-1]
        if is_ours and not nearby and not anywhere:
            yield word


#: what commands write.
MADE = {
    "report.html",
    "results.db",
    "conformance.json",
    "conformance.svg",
    "out.html",
    "step.rg",
    ".asv/comparison.txt",
    ".nox/env",
    "site",
}


def missing_sessions(text: str, root: Path) -> Iterator[str]:
    tree = ast.parse((root / "noxfile.py").read_text())
    known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for found in SESSIONS.findall(text):
        for word in found.split():
            if (name := word.strip('"').split("(")[0]) not in known:
                yield f"nox -s {name}"


@pytest.mark.parametrize("document", documents(ROOT), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_document_names_exists(document: Path, root: Path) -> None:
    text = document.read_text()
    assert [*missing_names(text), *missing_paths(text, document), *missing_sessions(text, root)] == []


def test_what_a_page_of_the_reference_shows_exists(root: Path) -> None:
    pages = {page.name: page.read_text() for page in (root / "docs/api").glob("*.md")}
    shown = [(page, name) for page, text in pages.items() for name in re.findall(r"^::: (\S+)", text, re.M)]
    assert len(shown) > len(pages)
    assert [(page, name) for page, name in shown if not is_there(name)] == []


@cache
def identifiers() -> frozenset[str]:
    """Everything that the code of retrograd calls by a name, and the names of its files."""
    names: set[str] = set()
    for path in HOMES["retrograd"].rglob("*.py"):
        names.add(path.parent.name if path.stem == "__init__" else path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            names |= {
                getattr(node, field)
                for field in ("id", "attr", "arg", "name")
                if isinstance(getattr(node, field, None), str)
            }
    return frozenset(names)


def stale(text: str, is_module: bool) -> set[str]:
    """Names in a docstring that do not exist: dotted ones; in a module's docstring also plain ones."""
    words = (
        {word for word in QUOTED.findall(text) if re.match(r"^_*[A-Za-z]\w*$", word)} if is_module else set()
    )
    single = set(re.findall(r"(?<!`)`(\w+)`(?!`)", text)) & words
    return set(missing_names(text)) | {word for word in single if word not in identifiers()}


def docstrings(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or "", isinstance(node, ast.Module)


def test_what_docstrings_name_exists() -> None:
    found: dict[str, set[str]] = {}
    for path in HOMES["retrograd"].rglob("*.py"):
        name = path.relative_to(HOMES["retrograd"]).as_posix()
        for text, is_module in docstrings(ast.parse(path.read_text())):
            if wrong := stale(text, is_module):
                found.setdefault(name, set()).update(wrong)
    assert found == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`retrograd.Config` and `aot.capture`", []),
        ("`aot.no_such_stage(fn)`", ["aot.no_such_stage"]),
        ("see `live.run.plan`, `x.grad`, `torch.nn.Linear`", []),
        ("`live/run/plan.py`, `corpus/scenarios/TOPIC.py`, `docs/`, `LICENSE`", []),
        ("`live/run/no_plan.py`", ["live/run/no_plan.py"]),
        ("`nothing.py`", ["nothing.py"]),
        ("[here](docs/nowhere.md), [there](https://x.org/y)", ["docs/nowhere.md"]),
        ('`nox -s lint types`, `nox -s "tests_torch(2.11.0)"`', []),
        ("`nox -s lint nonsense`", ["nox -s nonsense"]),
    ],
)
def test_the_search_for_missing_names_finds_them(text: str, missing: list[str]) -> None:
    document = ROOT / "README.md"
    assert [*missing_names(text), *missing_paths(text, document), *missing_sessions(text, ROOT)] == missing


def test_the_search_for_stale_docstrings_finds_them() -> None:
    assert stale("`NoSuchClass` in `live.nowhere`, ``loss.backward()``", True) == {
        "NoSuchClass",
        "live.nowhere",
    }
    assert stale("`NoSuchClass`, `BackwardGraph`", False) == set()
