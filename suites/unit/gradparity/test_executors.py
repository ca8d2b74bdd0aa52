"""Executors: a hang or a crash of one case costs that case only."""

import multiprocessing

import pytest

from gradparity.campaign import Campaign, Plan, run
from gradparity.corpus.registry import corpus
from gradparity.executors.inprocess import InProcess
from gradparity.executors.local import Local
from gradparity.executors.unit import Finished, Lost, Result, Started, Unit
from gradparity.verdict import Row, Verdict

NAME = "scenarios"


class Silent:
    """A listener that counts."""

    def __init__(self) -> None:
        self.total = self.done = self.rows = 0

    def units(self, total: int) -> None:
        self.total = total

    def unit_done(self) -> None:
        self.done += 1

    def row(self, row: Row) -> None:
        self.rows += 1


def campaign(*subjects: str, **options) -> tuple[Campaign, Silent]:
    listener = Silent()
    plan = Plan(subjects, (NAME,), **{"timeout": 1.0, "grace": 0.5, "limit_per_corpus": 1} | options)
    return run(plan, None, listener), listener


@pytest.fixture(scope="module")
def lossy() -> tuple[Campaign, Silent]:
    """One worker at a time, which each of the first three units spoils in its own way."""
    return campaign("planted:exit", "planted:hang", "planted:deaf-hang", "eager", processes=1)


def three_steps(unit: Unit, emit) -> bool:
    """Three steps; the process is unfit after the second, once."""
    for step in range(unit.start, 3):
        emit("start", step, {})
        emit("result", step, {"step": step})
        if step == 1:
            return False
    return True


def test_in_process_runs_the_rest_of_a_unit_after_an_unfit_step() -> None:
    messages = list(InProcess(three_steps).run([Unit({}, 1.0)]))
    assert [m.step for m in messages if isinstance(m, Result)] == [0, 1, 2]
    assert [m.step for m in messages if isinstance(m, Started)] == [0, 1, 2]
    assert isinstance(messages[-1], Finished)


@pytest.mark.parametrize(
    ("subject", "verdict", "reason"),
    [
        ("planted:exit", Verdict.CRASH, "exit status 7"),
        ("planted:hang", Verdict.TIMEOUT, "longer than 1 s"),
        ("planted:deaf-hang", Verdict.TIMEOUT, "killed"),
        ("eager", Verdict.AGREE, ""),
    ],
)
def test_a_worker_that_dies_or_hangs_is_replaced(lossy, subject: str, verdict: Verdict, reason: str) -> None:
    result, _ = lossy
    rows = [row for row in result.rows if row.subject == subject]
    assert [row.verdict for row in rows] == [verdict]
    assert reason in rows[0].reason
    assert rows[0].case.startswith(f"{NAME}::")


def test_losses_fail_the_run_and_every_unit_is_counted_once(lossy) -> None:
    result, listener = lossy
    assert result.exit_code == 1
    assert (listener.rows, listener.total, listener.done) == (4, 4, 4)


def test_two_processes_share_the_units() -> None:
    result, listener = campaign("eager", processes=2, timeout=30.0, limit_per_corpus=4)
    assert [row.verdict for row in result.rows] == [Verdict.AGREE] * 4
    assert listener.done == 4


def test_a_process_that_cannot_even_start_loses_its_unit_and_no_more() -> None:
    executor = Local(three_steps, 2)
    executor._context = FakeContext()
    messages = list(executor.run([Unit({"n": n}, 1.0) for n in range(3)]))
    assert [type(message) for message in messages] == [Lost] * 3
    assert messages[0].detail == "the worker ended with signal SIGSEGV"
    assert executor._workers == []


class FakeContext:
    """Processes that die at once."""

    def Pipe(self):
        return multiprocessing.get_context("spawn").Pipe()

    def Process(self, **_):
        return FakeProcess()


class FakeProcess:
    """A process that has already ended."""

    pid, exitcode = None, -11

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float) -> None: ...


def test_the_limit_spreads_over_the_corpus() -> None:
    result, _ = campaign("eager", processes=0, limit_per_corpus=3, timeout=30.0)
    chunks = corpus(NAME).chunks()
    expected = [chunks[0], chunks[len(chunks) // 3], chunks[2 * len(chunks) // 3]]
    assert [row.case.split("::")[1] for row in result.rows] == expected
