"""What a long compilation says while it runs, and what it does not say."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from retrograd import progress
from retrograd.events import progress_log
from retrograd.process import restored_on_error
from retrograd.progress import watched, working


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds in place of seconds."""
    for name, seconds in (("FIRST", 0.02), ("NEXT", 0.05), ("UNASKED", 0.06)):
        monkeypatch.setattr(f"retrograd.progress.{name}_PROGRESS", seconds)


def compile_three(seconds: float) -> None:
    done = 0
    with watched("the first run", lambda: f"{done} of 3 segments done"):
        for number in range(3):
            with working(f"compiling segment {number}"):
                time.sleep(seconds)
            done += 1


def test_who_asks_is_told_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "retrograd.progress"):
        compile_three(0.1)
    assert len(caplog.messages) >= 3
    assert caplog.messages[0] == "the first run: 0 s so far; 0 of 3 segments done; compiling segment 0"
    assert caplog.messages[-1].endswith("2 of 3 segments done; compiling segment 2")


def test_a_program_with_logging_gets_one_line_unasked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "retrograd.progress"):
        compile_three(0.1)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "RETROGRAD_LOGS=progress tells more" in caplog.messages[0]


def test_without_logging_the_line_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_log, "hasHandlers", lambda: False)
    compile_three(0.1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[retrograd.progress] the first run: 0 s so far; ")


def test_what_is_quick_says_nothing(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "retrograd.progress"):
        with working("something"):
            pass
    assert (caplog.messages, capsys.readouterr().err) == ([], "")


def test_a_long_run_that_compiles_nothing_says_nothing_unasked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "retrograd.progress"), watched("a run"):
        time.sleep(0.2)
    assert caplog.messages == []


def test_the_outermost_block_counts_the_seconds() -> None:
    with watched("a step"), working("the whole") as whole, working("a part") as part:
        time.sleep(0.02)
    assert part() == 0
    assert whole() >= 0.02
    with pytest.raises(ValueError, match="no"), working("what raises"):
        raise ValueError("no")
    with working("the next") as seconds:
        time.sleep(0.01)
    assert seconds() >= 0.01


def threads() -> int:
    return sum(thread.name == "retrograd-progress" for thread in threading.enumerate())


def interrupted(number: int, body: Callable[[], None]) -> bool:
    """Run `body` with an interrupt before instruction `number` of the module. Gives whether there is one."""
    file, left = progress.__file__, number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        restored_on_error(body)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_instruction_ends_what_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        with watched("what is interrupted"), working("its part"):
            pass

    before, number = threads(), 1
    while interrupted(number, body):
        number += 1
    assert number > 50
    deadline = time.monotonic() + 30
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threads() == before
    with caplog.at_level(logging.DEBUG, "retrograd.progress"):
        compile_three(0.1)
    assert {message.split(":")[0] for message in caplog.messages} == {"the first run"}
