"""Executors: a hang or a crash of one case costs that case only."""

import multiprocessing
import os
import time

import pytest

from gradparity.campaign import Campaign, Plan, run
from gradparity.corpus.registry import corpus
from gradparity.executors.inprocess import InProcess
from gradparity.executors.local import Local
from gradparity.executors.unit import Finished, Lost, Result, Started, Unit
from gradparity.verdict import Row, Verdict
from gradparity.work import Task, run_unit

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


def all_steps(unit: Unit, emit) -> bool:
    """One step, after which the process is as good as before."""
    emit("result", 0, {})
    return True


def test_a_worker_with_nothing_to_do_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, it would leave semaphores behind, of which Python warns at the end."""
    made, spawn = [], Local._spawn
    monkeypatch.setattr(Local, "_spawn", lambda self: made.append(spawn(self)) or made[-1])
    assert [type(m) for m in Local(all_steps, 1).run([Unit({}, 30.0)])] == [Result, Finished]
    assert [worker.process.exitcode for worker in made] == [0]


def test_a_case_that_is_taken_apart_has_the_time_twice() -> None:
    labels: list[dict] = []
    task = Task("eager", "autograd_function_db", "NumpyCubeAutogradFunction", "cpu", 0, ablate=True)
    run_unit(Unit(task.to_json(), 30.0), lambda kind, step, data: labels.append(data))
    assert labels[0]["limit"] == 60.0


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


def processes(unit: Unit, emit) -> bool:
    """Two steps, each of which tells its process."""
    for step in range(unit.start, 2):
        emit("start", step, {})
        emit("result", step, {"pid": os.getpid()})
        if unit.payload["fresh"] and step < 1:
            return False
    return True


@pytest.mark.parametrize(("fresh", "count"), [(False, 1), (True, 2)])
def test_a_worker_is_used_again_unless_each_step_wants_a_fresh_one(fresh: bool, count: int) -> None:
    messages = list(Local(processes, 1).run([Unit({"fresh": fresh}, 30.0)]))
    results = [message for message in messages if isinstance(message, Result)]
    assert [message.step for message in results] == [0, 1]
    assert len({message.data["pid"] for message in results}) == count
    assert isinstance(messages[-1], Finished)


def greedy(unit: Unit, emit) -> bool:
    """The first step takes ever more memory; the second is modest."""
    for step in range(unit.start, 2):
        emit("start", step, {"case": f"c::{step}"})
        held = []
        while step == 0:
            held.append(bytearray(os.urandom(1 << 24)))
            time.sleep(0.01)
        emit("result", step, {})
    return True


def test_a_step_that_takes_too_much_memory_costs_that_step_only() -> None:
    messages = list(Local(greedy, 1, memory=1 << 30).run([Unit({}, 60.0)]))
    (lost,) = [message for message in messages if isinstance(message, Lost)]
    assert (lost.step, lost.label, lost.why) == (0, {"case": "c::0"}, "out-of-memory")
    assert "allowed 1024 MiB" in lost.detail
    assert [message.step for message in messages if isinstance(message, Result)] == [1]


def test_a_plan_for_fresh_processes_gives_the_same() -> None:
    result, _ = campaign("eager", processes=1, timeout=30.0, limit_per_corpus=2, fresh=True)
    assert [row.verdict for row in result.rows] == [Verdict.AGREE] * 2
