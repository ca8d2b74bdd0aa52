"""The measures of the code: each is taken, and what it counts is what there is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import retrograd
from retrograd._torch.patches import TABLE
from whole_repo.house import Module, _is_state, entered_during, exceptions, patches, sizes, state, table, walk


@pytest.fixture
def modules() -> list[Module]:
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
    assert rows[0].details[0] == "_torch.patches"
    assert "live.session" in rows[0].details


def test_state_is_found(modules: list[Module]) -> None:
    rows = {row.what: row for row in state(modules)}
    assert rows["module-level state"].details == ["live/x.py: _seen", "live/x.py: global _count"]
    assert rows["cached functions"].details == ["live/x.py: f"]
    assert rows["locks that it does not"].found == 1


def test_exceptions_are_found(modules: list[Module]) -> None:
    (row,) = exceptions(modules)
    assert row.details == ["live/x.py: Broken"]


def test_the_largest_are_found(modules: list[Module]) -> None:
    rows = {row.what: row.found for row in sizes(modules)}
    assert rows["longest file"] == f"{modules[0].lines}, live/x.py"


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
    table_of_none = Module("_torch/patches.py", 1, ast.parse("TABLE: dict = {}"))
    row = list(patches([table_of_none, Module("live/x.py", 1, ast.parse("torch.a.b = 1"))]))[1]
    assert row.details == ["live/x.py:1 torch.a.b"]
