"""Executors: a hang or a crash of one case costs that case only."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradparity.campaign import Campaign, Plan, run
from gradparity.corpus.registry import corpus
from gradparity.executors.inprocess import InProcess
from gradparity.executors.local import Local
from gradparity.executors.unit import Finished, Lost, Result, Started, Unit
from gradparity.verdict import Verdict
from gradparity.work import Task, run_unit
from unit.gradparity.steps import greedy, processes, three_steps

pytestmark = pytest.mark.programs

NAME = "autograd_function_db"


def campaign(*subjects: str, **options) -> Campaign:
    return run(Plan(subjects, (NAME,), **{"timeout": 1.0, "grace": 0.5, "limit_per_corpus": 1} | options))


@pytest.fixture(scope="module")
def lossy() -> Campaign:
    """One worker at a time, which each of the first three units spoils in its own way."""
    return campaign("planted:exit", "planted:hang", "planted:deaf-hang", "eager", processes=1)


def test_in_process_runs_the_rest_of_a_unit_after_an_unfit_step() -> None:
    messages = list(InProcess(three_steps).run([Unit({}, 1.0)]))
    assert [m.step for m in messages if isinstance(m, Result)] == [0, 1, 2]
    assert [m.step for m in messages if isinstance(m, Started)] == [0, 1, 2]
    assert isinstance(messages[-1], Finished)


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
    rows = [row for row in lossy.rows if row.subject == subject]
    assert [row.verdict for row in rows] == [verdict]
    assert reason in rows[0].reason
    assert rows[0].case.startswith(f"{NAME}::")


def test_losses_fail_the_run_and_every_unit_is_counted_once(lossy) -> None:
    assert lossy.exit_code == 1
    assert (len(lossy.rows), lossy.total, lossy.completed) == (4, 4, 4)


DIES = """
import os

from gradparity import scenario


@scenario()
def ends_the_process(p):
    \"\"\"The program itself ends the process, whoever runs it.\"\"\"
    os._exit(9)
"""


def test_a_case_that_eager_alone_does_not_survive_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    plan = Plan(("compile:inductor",), (f"folder:{tmp_path}",), processes=1, timeout=30.0)
    result = run(plan)
    (row,) = result.rows
    assert (row.symptom, row.set_aside, result.exit_code) == ("set-aside", True, 0)
    assert row.reason == "eager alone ends its worker, too: the worker ended with exit status 9"


def test_two_processes_share_the_units() -> None:
    result = campaign("eager", processes=2, timeout=30.0, limit_per_corpus=4)
    assert [row.verdict for row in result.rows] == [Verdict.AGREE] * 4
    assert result.completed == 4


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
    result = campaign("eager", processes=0, limit_per_corpus=3, timeout=30.0)
    chunks = corpus(NAME).chunks()
    expected = [chunks[0], chunks[len(chunks) // 3], chunks[2 * len(chunks) // 3]]
    assert [row.case.split("::")[1] for row in result.rows] == expected


@pytest.mark.parametrize(("fresh", "count"), [(False, 1), (True, 2)])
def test_a_worker_is_used_again_unless_each_step_wants_a_fresh_one(
    fresh: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with nothing more to do ends by itself: killed, it would leave semaphores behind."""
    made, spawn = [], Local._spawn
    monkeypatch.setattr(Local, "_spawn", lambda self: made.append(spawn(self)) or made[-1])
    messages = list(Local(processes, 1).run([Unit({"fresh": fresh}, 30.0)]))
    results = [message for message in messages if isinstance(message, Result)]
    assert [message.step for message in results] == [0, 1]
    assert len({message.data["pid"] for message in results}) == count
    assert isinstance(messages[-1], Finished)
    assert made[-1].process.exitcode == 0


KILLED = """
from gradparity.executors.local import Local
from gradparity.executors.unit import Result, Unit
from unit.gradparity.steps import progress

if __name__ == "__main__":
    messages = [*Local(progress, 1).run([Unit({}, 30.0)])]
    print([message.data["sum"] for message in messages if isinstance(message, Result)])
"""


def test_a_worker_that_is_killed_leaves_no_semaphore(tmp_path: Path) -> None:
    """Python's resource tracker warns of those at the end."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    path = os.pathsep.join(each for each in sys.path if each)
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (ran.stdout, ran.stderr) == ("[3, 3]\n", "")


def test_a_step_that_takes_too_much_memory_costs_that_step_only() -> None:
    messages = list(Local(greedy, 1, memory=1 << 30).run([Unit({}, 60.0)]))
    (lost,) = [message for message in messages if isinstance(message, Lost)]
    assert (lost.step, lost.label, lost.why) == (0, {"case": "c::0"}, "out-of-memory")
    assert "allowed 1024 MiB" in lost.detail
    assert [message.step for message in messages if isinstance(message, Result)] == [1]


def test_a_plan_for_fresh_processes_gives_the_same() -> None:
    result = campaign("eager", processes=0, timeout=30.0, limit_per_corpus=2, fresh=True)
    assert [row.verdict for row in result.rows] == [Verdict.AGREE] * 2
