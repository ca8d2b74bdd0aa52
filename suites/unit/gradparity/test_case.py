"""Cases: addresses there and back, globs."""

import pytest

from gradparity.case import Case, Match
from gradparity.errors import CaseError


@pytest.mark.parametrize("case", [Case("op_db", "add", 3, 7), Case("scenarios", "two_branches")])
def test_address_and_json_lead_back_to_the_case(case: Case) -> None:
    assert Case.parse(case.address, case.seed) == case
    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize("text", ["", "op_db", "op_db::", "::add", "op_db::add::x", "op_db::add::1::2"])
def test_parse_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(CaseError, match="not a case address"):
        Case.parse(text)


@pytest.mark.parametrize(
    ("glob", "taken"),
    [("*", True), ("ad*", True), ("mul", False), ("op_db::add", True), ("module_db::add", False)]
    + [("op_db::add::3", True), ("op_db::add::4", False), ("*::*::3", True)],
)
def test_match(glob: str, taken: bool) -> None:
    assert Match((glob,)).takes(Case("op_db", "add", 3)) is taken


@pytest.mark.parametrize(("index", "taken"), [(3, True), (4, False), (5, True)])
def test_one_of_several_globs_is_enough(index: int, taken: bool) -> None:
    globs = Match(("op_db::add::3", "mul", "op_db::a*::5"))
    assert globs.takes(Case("op_db", "add", index)) is taken
    assert globs.takes_chunk("op_db", "mul")
    assert not globs.takes_chunk("op_db", "sub")
