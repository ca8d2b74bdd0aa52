"""Generated functions: how much of Python's own stack they leave to what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retrograd.graph.emit import Emitter, with_room

resource = pytest.importorskip("resource", reason="counts page faults")


def calling(variables: int) -> Callable[..., Any]:
    """A generated function with so many variables, which calls its argument."""
    emit = Emitter("run(fn)")
    for number in range(variables):
        emit.line(f"v{number} = 0")
    emit.line("return fn()")
    return emit.function()


def nested(depth: int) -> int:
    return nested(depth - 1) if depth else 0


def most_faults(run: Callable[..., Any]) -> int:
    """The page faults of the worst depth at which Python functions are called fifty times below `run`."""
    found = []
    for depth in range(0, 240, 3):

        def hook(depth: int = depth) -> None:
            for _ in range(50):
                nested(depth)

        run(hook)  # memory that is needed once
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        run(hook)
        found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    return max(found)


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="only Linux counts faults of threads")
@pytest.mark.parametrize("variables", [600, 900, 3000])
def test_what_a_plan_calls_allocates_no_memory_for_frames(variables: int) -> None:
    """Without room, some depth allocates and frees a chunk of memory in each call."""
    assert most_faults(calling(variables)) > 100
    assert most_faults(with_room(calling(variables))) < 50


def test_a_small_frame_costs_no_memory_of_its_own() -> None:
    """A chunk for each backward costs more than the whole of a short one gains."""
    small = calling(100)
    code = small.__code__
    assert with_room(small).__code__ is code
