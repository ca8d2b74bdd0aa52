"""Limits: a busy machine is no reason to give a case up, and a message says how busy it was."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradparity import limit as limits
from gradparity.campaign import Corpora, Plan, run
from gradparity.errors import CaseTimeout
from gradparity.executors.local import Local
from gradparity.executors.unit import Lost, Result, Unit
from gradparity.fuzz import FuzzOptions, fuzz
from gradparity.limit import BACKSTOP, Limit, processor_seconds
from gradparity.store.store import Progress, Store
from gradparity.subjects.base import Subject
from gradparity.verdict import Verdict
from gradparity.work import alarm
from unit.gradparity.steps import computing, sleeping

pytestmark = pytest.mark.programs

TOLD = re.compile(
    r"it had \d+\.\d s of processor time in \d+\.\d s \(\d+ %\); load average \d+\.\d on \d+ proc"
)


def busy_for(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@contextmanager
def loops(count: int) -> Iterator[list[subprocess.Popen]]:
    """Processes that compute all the time, on the processors that this one may use."""
    started = [subprocess.Popen([sys.executable, "-Sc", "while True: pass"]) for _ in range(count)]
    try:
        while any(processor_seconds(each.pid) < 0.05 for each in started):
            time.sleep(0.05)
        yield started
    finally:
        for each in started:
            each.kill()
            each.wait()


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the limit reads: the wall, the processor, the load of a machine with two processors."""
    shown = {"wall": 0.0, "used": 0.0, "load": 0.0}
    monkeypatch.setattr(limits.time, "monotonic", lambda: shown["wall"])
    monkeypatch.setattr(limits, "processor_seconds", lambda pid=None: shown["used"])
    monkeypatch.setattr(limits, "processors", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (shown["load"], 0.0, 0.0))
    return shown


@pytest.mark.parametrize(
    ("wall", "used", "load", "over"),
    [
        (9.9, 9.9, 0.0, False),
        (10.0, 0.0, 2.0, True),  # it hangs
        (10.0, 0.0, 2.1, False),  # it may have waited for a processor
        (39.9, 9.9, 8.0, False),
        (11.0, 10.0, 8.0, True),  # it had its time
        (BACKSTOP * 10.0, 0.0, 8.0, True),
    ],
)
def test_a_limit_is_one_on_processor_time(
    clocks: dict[str, float], wall: float, used: float, load: float, over: bool
) -> None:
    limit = Limit(10.0)
    clocks.update(wall=wall, used=used, load=load)
    assert limit.is_over() is over


def test_a_limit_says_how_busy_the_machine_was(clocks: dict[str, float]) -> None:
    limit = Limit(10.0)
    clocks.update(wall=40.0, used=5.0, load=8.0)
    told = "it had 5.0 s of processor time in 40.0 s (12 %); load average 8.0 on 2 processors"
    assert limit.describe() == told


def test_the_processor_time_of_another_process_is_known() -> None:
    with loops(1) as (loop,):
        limit = Limit(1.0, loop.pid)
        while limit.used < 0.2:
            time.sleep(0.01)
        assert limit.used <= limit.wall + 0.1
    assert processor_seconds(loop.pid) == 0.0


def test_an_alarm_waits_for_a_case_that_busy_loops_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops take three of four shares of the one processor that all may use."""
    monkeypatch.setattr(limits, "is_busy", lambda: True)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with loops(3), alarm(1.0):
            limit = Limit(1.0)
            while limit.wall < 1.6:
                pass
            used = limit.used
        assert used < 1.0
    finally:
        os.sched_setaffinity(0, before)


def test_an_alarm_ends_a_case_that_used_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "is_busy", lambda: True)
    with pytest.raises(CaseTimeout, match=r"longer than 0\.3 s: it had") as raised, alarm(0.3):
        busy_for(20.0)
    assert TOLD.search(str(raised.value))


def test_a_worker_that_computes_beyond_its_limit_is_killed_and_told_of() -> None:
    messages = list(Local(computing, 1, grace=0.2).run([Unit({}, 0.5, overhead=60.0)]))
    (lost,) = [message for message in messages if isinstance(message, Lost)]
    assert (lost.why, lost.step) == ("timeout", 0)
    assert lost.detail.startswith("no answer within 0.5 s, killed: ")
    assert TOLD.search(lost.detail)


def test_a_worker_that_waits_for_a_processor_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "is_busy", lambda: True)
    messages = list(Local(sleeping, 1, grace=0.1).run([Unit({}, 0.5, overhead=60.0)]))
    assert [message.step for message in messages if isinstance(message, Result)] == [0]


class HangsOnce(Subject):
    """Its first backward hangs; the others are eager's."""

    hung = False

    def backward(self):
        if not HangsOnce.hung:
            HangsOnce.hung = True
            time.sleep(60)
        return super().backward()


NAME = f"import:{__name__}:HangsOnce"
PLAN = Plan((NAME,), ("autograd_function_db",), timeout=3.0, limit_per_corpus=2, processes=0)


def test_a_case_that_timed_out_runs_once_more_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangsOnce, "hung", False)
    found = run(PLAN)
    assert [row.verdict for row in found.rows] == [Verdict.AGREE] * 2
    (note,) = [note for row in found.rows for note in row.notes]
    assert note.startswith("beside other cases: longer than 3 s: it had")
    assert (found.total, found.completed) == (2, 2)


def test_a_campaign_that_goes_on_tries_again_what_timed_out_before(tmp_path, monkeypatch) -> None:
    """The first process is killed between the two tries."""
    monkeypatch.setattr(HangsOnce, "hung", False)
    with Store(tmp_path / "store") as store:
        progress = Progress.of(store, "c", {}, {})
        run(PLAN, progress=progress, source=EndsEarly)
    with Store(tmp_path / "store") as store:
        found = run(PLAN, progress=Progress.of(store, "c", {}, {}))
    assert [row.verdict for row in found.rows] == [Verdict.AGREE] * 2
    assert len([row for row in found.rows if row.notes]) == 1


class EndsEarly(Corpora):
    """A campaign that is killed after its first round."""

    def rounds(self):
        yield next(super().rounds())
        raise KeyboardInterrupt


def test_a_generated_case_that_timed_out_runs_once_more_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangsOnce, "hung", False)
    options = FuzzOptions(NAME, cases=2, policies=("elementwise",), processes=0, timeout=3.0)
    summary = fuzz(options, lambda summary, entry: None)
    assert (summary.cases, summary.verdicts) == (2, {"AGREE": 2})
