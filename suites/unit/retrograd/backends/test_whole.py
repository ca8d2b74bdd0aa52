"""Code of a whole graph in place of code in parts: when, with which layouts, and what prevents it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from retrograd.backends.tier_up import TierUp
from retrograd.events import counters

Code = Callable[[list[Any]], Sequence[Any]]
ORDER = ["begin", "finish"]


def parts(args: list[Any]) -> Sequence[Any]:
    """The first code; its second result is transposed, the third no tensor."""
    (x,) = args
    args.clear()
    return x + 1, x.t().contiguous().t(), 3


def whole(args: list[Any]) -> Sequence[Any]:
    """The second; what it computes lets a test tell it from the first."""
    (x,) = args
    args.clear()
    return x + 2, x.clone(), 3


class Elsewhere:
    """Who compiles the whole: notes what was asked of it, and after how many calls."""

    def __init__(self, fails: str | None = None) -> None:
        self.fails, self.calls, self.asked = fails, 0, list[tuple[str, int]]()

    def code(self, calls: int) -> Code:
        later = TierUp(parts, calls, self.begin, self.finish)

        def run(args: list[Any]) -> Sequence[Any]:
            self.calls += 1
            return later(args)

        return run

    def begin(self) -> None:
        self._note("begin")

    def finish(self) -> Code:
        self._note("finish")
        return whole

    def _note(self, what: str) -> None:
        self.asked.append((what, self.calls))
        if what == self.fails:
            raise ValueError("planted")


def added(code: Code, runs: int) -> list[float]:
    """What the runs add to their input: 1 in parts, 2 as a whole."""
    x = torch.arange(6.0).view(2, 3)
    return [float((code([x])[0] - x).mean()) for _ in range(runs)]


@pytest.mark.parametrize(("calls", "begun"), [(2, 1), (3, 1), (20, 2), (100, 10)])
def test_the_whole_comes_after_a_fixed_number_of_calls(calls: int, begun: int) -> None:
    counters.clear()
    elsewhere = Elsewhere()
    assert added(elsewhere.code(calls), calls + 3) == [1] * calls + [2] * 3
    assert elsewhere.asked == [("begin", begun), ("finish", calls)]
    assert counters["whole_graphs"] == 1


def test_its_results_lie_as_those_of_parts() -> None:
    code, x = Elsewhere().code(2), torch.arange(6.0).view(2, 3)
    strides = []
    for _ in range(4):
        first, second, number = code([x])
        assert torch.equal(second, x)
        assert number == 3
        strides.append((first.stride(), second.stride()))
    assert strides == [((3, 1), (1, 2))] * 4


@pytest.mark.parametrize("fails", ORDER)
def test_parts_remain_where_one_of_them_raises(fails: str) -> None:
    elsewhere = Elsewhere(fails)
    assert added(elsewhere.code(3), 6) == [1] * 6
    assert [what for what, _ in elsewhere.asked] == ORDER[: ORDER.index(fails) + 1]


def test_what_compiles_is_freed_after_the_change() -> None:
    elsewhere = Elsewhere()
    later, alive = TierUp(parts, 2, elsewhere.begin, elsewhere.finish), weakref.ref(elsewhere)
    del elsewhere
    gc.collect()
    assert alive() is not None
    assert added(later, 3) == [1, 1, 2]
    gc.collect()
    assert alive() is None


def test_nothing_is_compiled_under_a_mode_that_would_see_it() -> None:
    elsewhere = Elsewhere()
    code = elsewhere.code(2)
    with FlopCounterMode(display=False):
        assert added(code, 5) == [1] * 5
    assert elsewhere.asked == []
    assert added(code, 4) == [1, 1, 2, 2]
    assert [what for what, _ in elsewhere.asked] == ORDER


@pytest.mark.parametrize("calls", [2, 40])
def test_one_of_several_threads_changes_over(calls: int) -> None:
    elsewhere = Elsewhere()
    code, found = elsewhere.code(calls), list[float]()
    threads = [threading.Thread(target=lambda: found.extend(added(code, calls))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [what for what, _ in elsewhere.asked] == ORDER
    assert {*found} <= {1.0, 2.0}
    assert added(code, 1) == [2]
