"""The program that measures the examples: figures of what runs, reasons for what does not."""

from __future__ import annotations

import time

from ecosystem import gains


def test_steps_are_measured_and_a_failure_has_a_reason() -> None:
    until = time.monotonic() + 250
    found = gains.measured("optimizer_in_backward", "cpu", until, rounds=2, ways=("eager",))
    assert set(found["eager"]) == {"start", "step", "of eager"}
    assert found["eager"]["of eager"] == 1.0
    assert 0 < found["eager"]["step"] < found["eager"]["start"]
    missing = gains.measured("no_such_example", "cpu", until, rounds=1, ways=("eager",))
    assert missing == {
        "eager": {"missing": "ModuleNotFoundError: No module named 'ecosystem.no_such_example'"}
    }


def test_a_way_that_takes_too_long_has_a_reason() -> None:
    found = gains.measured("optimizer_in_backward", "cpu", time.monotonic(), rounds=1, ways=("eager",))
    assert found == {"eager": {"missing": "it took longer than there was time"}}
