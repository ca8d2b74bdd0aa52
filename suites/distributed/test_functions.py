"""Collectives inside Functions on two real processes: every way in waits for them as eager does.

Stock compiles them by functional collectives, which an operator waits for. A trace of the Function's Python
records the collective without the wait.
"""

from __future__ import annotations

import pytest

from distributed.functions import OPERATORS, RANKS, compare
from distributed.group import spawned

pytestmark = pytest.mark.programs

ALL = [operator.__name__ for operator in OPERATORS]
SOME = ["all_reduce", "all_gather_into_tensor", "coalesced", "future", "of_torch"]


@pytest.mark.parametrize(("ways", "operators"), [(["compile"], ALL), (["aot", "step", "live"], SOME)])
def test_a_collective_in_a_function_is_waited_for(ways: list[str], operators: list[str]) -> None:
    spawned(compare, RANKS, ways, operators)
