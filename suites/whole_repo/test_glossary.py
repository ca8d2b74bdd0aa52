"""One word has one meaning: the names of retrograd keep to `docs/glossary.md`.

In: the table of the glossary, and all names that retrograd's code gives. Out: names with a word that the
glossary rules out, and names that mean two things.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

Names = dict[str, str]  # a name, and one place where it is given


def ruled_out(glossary: str) -> set[str]:
    """The words of the table's third column, and the adverbs and verbs of the line below it."""
    rows = [line.split("|")[3] for line in glossary.splitlines() if line.startswith("|")][2:]
    below = glossary.split("An adverb is no name:")[1].split("\n\n")[0].splitlines()[0]
    text = " ".join((*rows, below)).replace("Nor is a verb of saying", "")
    return set(re.findall(r"\w+", text))


def given(tree: ast.AST) -> Iterator[str]:
    """The names that code gives: of functions, classes, parameters, variables and attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> list[str]:
    """`is_traced_again` and `TracedAgain` are `traced` and `again`, among others."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def trees(root: Path) -> dict[str, ast.Module]:
    home = root / "packages/retrograd/src/retrograd"
    return {path.relative_to(home).as_posix(): ast.parse(path.read_text()) for path in home.rglob("*.py")}


def test_no_name_has_a_word_that_the_glossary_rules_out(root: Path) -> None:
    wrong = ruled_out((root / "docs/glossary.md").read_text())
    found = {
        f"{place}: {name}"
        for place, tree in trees(root).items()
        for name in given(tree)
        if any(f"_{word}_" in f"_{'_'.join(words(name))}_" for word in wrong)
    }
    assert found == set()


def test_no_two_classes_share_a_name(root: Path) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for place, tree in trees(root).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_module_holds_something_of_its_own_name(root: Path) -> None:
    found = [
        place
        for place, tree in trees(root).items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == Path(place).stem
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [("is_run_again", ["is", "run", "again"]), ("_RunAgain", ["run", "again"]), ("later", ["later"])],
)
def test_a_name_is_divided_into_words(name: str, parts: list[str]) -> None:
    assert words(name) == parts


def test_the_glossary_rules_words_out(root: Path) -> None:
    wrong = ruled_out((root / "docs/glossary.md").read_text())
    assert {"tape", "remat", "residual", "again", "noted", "said"} <= wrong
    assert not {"saved", "meaning", "not", "nor", "verb"} & wrong
