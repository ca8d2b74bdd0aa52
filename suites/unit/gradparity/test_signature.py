"""Signatures: equal for the same defect in another program, different for another defect."""

from dataclasses import replace

import pytest
import torch

from gradparity.differential import compare
from gradparity.errors import CaseError
from gradparity.outcome import Raised
from gradparity.signature import Signature, signature_of
from gradparity.subjects.base import Subject
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict

CPU = torch.device("cpu")


class Breaks(Subject):
    """Compiles nothing: raises, with a number in the text."""

    def compile(self, target):
        number = id(target)
        try:
            raise LookupError(f"inner {number}")
        except LookupError as error:
            raise RuntimeError(f"outer {number}") from error


def signature(bench, body, subject: Subject) -> Signature:
    return signature_of(compare(bench.program(body), subject, CPU).row)


def two_leaves(first: str, second: str):
    def body(p) -> None:
        x, y = (p.leaf(name, p.randn(len(name), requires_grad=True)) for name in (first, second))
        with p.backward():
            (x.sum() * y.sum()).backward()

    return body


def test_names_and_sizes_are_no_part_of_it(bench) -> None:
    subject = resolve("planted:scale-grad")
    one, two = (signature(bench, two_leaves(*names), subject) for names in (("x", "y"), ("left", "right")))
    assert one == two
    assert one.digest == two.digest
    assert one.describe() == "DIVERGE grad-values-bits at grad"


def test_another_defect_has_another_one(bench, hooked_body) -> None:
    faults = ("scale-grad", "none-grad", "swap-hooks", "drop-event", "raise")
    found = [signature(bench, hooked_body, resolve(f"planted:{fault}")) for fault in faults]
    assert len({item.digest for item in found}) == len(faults)


def test_an_exception_is_known_by_its_first_cause_without_numbers(bench) -> None:
    def body(p) -> None:
        p.compile(lambda x: x)

    one, two = (signature(bench, body, Breaks("breaks")) for _ in range(2))
    assert one == two
    assert one.symptom == "raises RuntimeError"
    assert "inner" in one.place
    assert "outer" not in one.place
    assert not any(letter.isdigit() for letter in one.place)


def test_an_exception_says_which_function_of_a_package_raised() -> None:
    with pytest.raises(KeyError) as caught:
        torch.nn.Linear(2, 2).register_parameter("a.b", None)
    found = Raised.of(caught.value)
    assert found.where == "torch/nn/modules/module.py:register_parameter"
    assert found.cause.startswith("KeyError: ")


def test_a_smaller_program_covers_a_larger_one_that_looks_the_same() -> None:
    row = Row("a::b", 0, "a", "s", Verdict.DIVERGE, "grad-values", place="grad")
    small, large = signature_of(row, ("sin",)), signature_of(row, ("sum", "sin", "sum"))
    assert large.operators == ("sin", "sum")
    assert small.covers(large)
    assert not large.covers(small)
    assert small.coarse == large.coarse == signature_of(row)


def test_a_refusal_covers_the_same_refusal_of_any_program() -> None:
    row = Row("a::b", 0, "a", "s", Verdict.UNSUPPORTED, "raises RuntimeError", place="f RuntimeError: no")
    one, other = signature_of(row, ("sin",)), signature_of(row, ("cos",))
    assert one.covers(other)
    assert not one.covers(signature_of(replace(row, place="f RuntimeError: never"), ("sin",)))


def test_it_travels_as_plain_data() -> None:
    made = Signature(Verdict.CRASH, "raises KeyError", "here", ("a", "b"))
    assert Signature.from_json(made.to_json()) == made


def test_rows_keep_the_place() -> None:
    row = Row("a::b", 0, "a", "s", Verdict.DIVERGE, "grad-values", place="grad")
    assert Row.from_json(row.to_json()) == row


@pytest.mark.parametrize("error", [CaseError("x"), ValueError("")])
def test_an_exception_without_traceback_is_recorded(error: Exception) -> None:
    assert Raised.of(error).where == ""
