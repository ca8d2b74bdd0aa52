"""The measures of the code: each is taken, and what it counts is what there is."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

import retrograd
from retrograd.facts.patches import TABLE
from whole_repo.house import (
    BUDGET,
    Module,
    _is_state,
    code_lines,
    entered_during,
    exceptions,
    folders,
    modules,
    patches,
    sizes,
    state,
    table,
    walk,
)


@pytest.fixture
def sources() -> list[Module]:
    code = """
import functools
_seen = set()
LIMIT = dict()
class Broken(ValueError): pass
@functools.cache
def f():
    global _count
    lock = threading.Lock()
"""
    return [Module("live/x.py", len(code.splitlines()), ast.parse(code))]


def test_every_measure_of_the_sources_is_taken() -> None:
    rows = {row.what: row.found for row in table()}
    assert rows["patches of torch in the one table"] == len(TABLE)
    assert rows["attributes of torch set elsewhere"] == 0
    assert int(str(rows["lines of retrograd"])) > 10_000


def test_a_backward_is_followed_from_module_to_module() -> None:
    rows = list(walk())
    assert rows[0].details[0] == "facts.patches"
    assert "live.session" in rows[0].details


def test_state_is_found(sources: list[Module]) -> None:
    rows = {row.what: row for row in state(sources)}
    assert rows["module-level state"].details == ["live/x.py: _seen", "live/x.py: global _count"]
    assert rows["cached functions"].details == ["live/x.py: f"]
    assert rows["locks that it does not"].found == 1


def test_exceptions_are_found(sources: list[Module]) -> None:
    (row,) = exceptions(sources)
    assert row.details == ["live/x.py: Broken"]


def test_the_largest_are_found(sources: list[Module]) -> None:
    rows = {row.what: row.found for row in sizes(sources)}
    assert rows["longest file"] == f"{sources[0].lines}, live/x.py"


@pytest.mark.parametrize(
    ("name", "value", "is_state"),
    [
        ("_seen", "set()", True),
        ("_LIMIT", "{}", False),
        ("_log", "logging.getLogger()", False),
        ("n", "1", False),
    ],
)
def test_constants_and_loggers_are_no_state(name: str, value: str, is_state: bool) -> None:
    assert _is_state(name, ast.parse(value, mode="eval").body) is is_state


def test_only_modules_of_ours_are_entered() -> None:
    assert entered_during(retrograd.reset)[:1] == ["api"]
    assert entered_during(lambda: Path("x").name) == []


def test_a_patch_outside_of_the_table_is_found() -> None:
    row = list(patches([Module("live/x.py", 1, ast.parse("torch.a.b = 1"))]))[1]
    assert row.details == ["live/x.py:1 torch.a.b"]


def test_no_folder_has_more_code_than_its_budget() -> None:
    allowed = tomllib.loads(BUDGET.read_text())["folders"]
    over = {name: size for name, size in folders(modules()).items() if size > allowed.get(name, 0)}
    assert over == {}, "delete something, or raise the number in budget.toml and say why in the commit"


def test_a_budget_is_that_of_a_folder_that_there_is() -> None:
    assert tomllib.loads(BUDGET.read_text())["folders"].keys() == folders(modules()).keys()


def test_only_lines_with_code_are_counted() -> None:
    text = '''"""A docstring
of two lines."""

import os
from a import (
    b,
)


# a comment
class C:
    """One more."""

    x = """a string
    of two lines"""

    def f(self) -> int:
        """One more."""
        return os.f(
            b
        )
'''
    assert code_lines(text) == 7
