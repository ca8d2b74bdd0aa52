"""The tables of facts: what may stand in them, and that torch still has what they speak of."""

from __future__ import annotations

import importlib
import operator
import re
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from retrograd.facts import answers, fact, functions, is_of_family, read_table
from retrograd.probe import TESTED

ROOT = Path(__file__).resolve().parents[4]
TABLES = ROOT / "packages/retrograd/src/retrograd/facts"
OLDEST, HERE = TESTED[0], tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
aten = torch.ops.aten


def is_layout(answer: object) -> bool:
    if isinstance(answer, dict):
        return answer.keys() <= {"cpu", "cuda", "other"} and all(map(is_layout, answer.values()))
    if isinstance(answer, list):
        return all(isinstance(one, int) for one in answer)
    return answer in ("contiguous", "half") or isinstance(answer, int)


def is_number(answer: object) -> bool:
    return isinstance(answer, int)


def are_numbers(answer: object) -> bool:
    return isinstance(answer, list) and all(map(is_number, answer))


def among(*known: object) -> Callable[[object], bool]:
    return known.__contains__


def is_release(text: Any) -> bool:
    return re.fullmatch(r"2\.\d+", text) is not None


def release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


#: by question, whether something is an answer to it.
QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "layout": is_layout,
    "copies": among(True),
    "overlaps": among(True),
    "alias": among("undeclared", "same"),
    "writes": are_numbers,
    "writes_if": is_number,
    "declared_by": lambda name: hasattr(aten, name),
    "unread": are_numbers,
    "unread_if": is_number,
    "raises": among("check", "only", "value"),
    "fills": among(True),
    "cast": among(True),
    "reinplaced": among("index", "view"),
    "whole": among(True),
    "since": is_release,
}


def rows() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for namespace in ("aten", "prims"):
        for name, row in read_table("operators")[namespace].items():
            yield namespace, name, row


def test_an_operator_has_answers_to_known_questions() -> None:
    wrong = [
        (name, question, answer)
        for _, name, row in rows()
        for question, answer in row.items()
        if question not in QUESTIONS or not QUESTIONS[question](answer)
    ]
    assert wrong == []
    assert all(row.keys() - {"since"} for _, _, row in rows())


def test_each_question_is_asked_and_explained() -> None:
    text = (TABLES / "operators.toml").read_text()
    asked = {question for _, _, row in rows() for question in row} | {"since"}
    assert asked == QUESTIONS.keys()
    assert [one for one in asked if not re.search(rf"^# {one} |`{one}`", text, re.MULTILINE)] == []


def test_torch_has_the_operators() -> None:
    """A row whose operator begins later says since when; one whose operator is gone everywhere goes."""

    def is_there(namespace: str, name: str) -> bool:
        try:
            operator.attrgetter(name)(getattr(torch.ops, namespace))
        except AttributeError:
            return False
        return True

    wrong = [
        name
        for namespace, name, row in rows()
        if not is_there(namespace, name) and release(row.get("since", OLDEST)) <= HERE
    ]
    assert wrong == []
    assert all(is_there("higher_order", name) for name in functions("self_contained"))


def test_a_row_for_all_overloads_and_one_for_an_overload_are_read_together() -> None:
    assert [fact("fills", one) for one in (aten.bernoulli_.Tensor, aten.bernoulli_.float)] == [True] * 2
    assert [fact("raises", one) for one in (aten.bernoulli_.Tensor, aten.bernoulli_.float)] == ["value", None]
    assert fact("layout", aten.pow.Scalar) == "contiguous"
    assert fact("layout", aten.pow.Tensor_Scalar) is None
    assert [fact("raises", other) for other in (operator.add, torch.sin, "output")] == [None] * 3


def test_operators_that_change_an_argument_are_no_answers() -> None:
    assert aten.cholesky.default in answers("raises")
    assert aten.cholesky.out not in answers("raises")
    assert aten.masked_scatter_.default not in answers("raises")


def test_a_family_is_one_by_name() -> None:
    names = ["mm", "addmm", "convolution_backward", "mul", "scatter_add", "_softmax"]
    assert [is_of_family("unfused", name) for name in names] == [True, True, True, False, True, False]


def test_a_table_is_read_in_milliseconds() -> None:
    texts = [path.read_text() for path in TABLES.glob("*.toml")]

    def took() -> float:
        before = time.thread_time()
        for text in texts:
            tomllib.loads(text)
        return time.thread_time() - before

    assert min(took() for _ in range(5)) < 0.02


# repairs and patches

REPAIRS = read_table("repairs")


@pytest.mark.parametrize("name", REPAIRS)
def test_a_repair_is_of_a_fault_of_a_release_that_we_support(name: str) -> None:
    row = REPAIRS[name]
    assert {"what", "where", "since", "link"} <= row.keys() <= {"what", "where", "since", "until", "link"}
    until = row.get("until")
    assert until is None or release(until) > release(OLDEST), "nobody needs the repair any more: delete it"
    assert is_release(row["since"])
    assert until is None or release(row["since"]) < release(until)


@pytest.mark.parametrize("name", REPAIRS)
def test_a_repair_is_where_the_table_says(name: str) -> None:
    module, _, attribute = REPAIRS[name]["where"].partition(":")
    assert callable(getattr(importlib.import_module(f"retrograd.{module}"), attribute))


@pytest.mark.parametrize("name", REPAIRS)
def test_a_fault_has_a_thread_or_a_file_that_shows_it(name: str) -> None:
    link = REPAIRS[name]["link"]
    assert link.startswith("https://github.com/pytorch/pytorch/") or (ROOT / link).exists()


def test_a_patch_says_why_or_which_fault_it_repairs() -> None:
    table = read_table("patches")["patches"]
    assert all(row.keys() <= {"why", "only", "repair"} for row in table.values())
    assert [name for name, row in table.items() if "why" not in row and "repair" not in row] == []
    assert {row["repair"] for row in table.values() if "repair" in row} <= REPAIRS.keys()
