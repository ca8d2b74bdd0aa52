"""Worker processes on this machine.

In: a module-level function and units. Out: messages. A worker that crashes or hangs is killed and replaced
alone; the rest of its unit goes to another worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gradparity.executors.unit import Finished, Lost, Message, Result, RunUnit, Started, Unit
from gradparity.executors.worker import worker_main
from gradparity.limit import Limit

GRACE = 10.0
"""Seconds after a step's time limit until the worker is killed; within it the worker may end the step by
itself.
"""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    log: Path
    unit: Unit | None = None
    step: int | None = None
    label: dict[str, Any] | None = None
    limit: Limit | None = None

    def give(self, unit: Unit) -> bool:
        """Sends the unit; False if the process is dead already."""
        self.unit, self.step, self.label = unit, None, None
        self.allow(unit.timeout, unit.overhead)
        try:
            self.pipe.send(unit)
        except OSError:
            return False
        return True

    def allow(self, limit: float, more: float = 0.0) -> None:
        """Sets the time within which the worker has to say something."""
        self.limit = Limit(limit + more, self.process.pid)

    def kill(self) -> None:
        """Ends the process and everything it started (it leads its own process group)."""
        pid = self.process.pid
        try:
            if pid is not None and self.process.is_alive():
                os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.process.join(5)
        self.pipe.close()


class Local:
    """A pool of processes.

    Arguments: the function that runs a unit (importable by name), the number of processes, the grace period,
    the most bytes that a worker may hold (None: whatever the system lets it), and modules that one process
    imports for all of them.
    """

    def __init__(
        self,
        run_unit: RunUnit,
        processes: int,
        grace: float = GRACE,
        memory: int | None = None,
        preload: tuple[str, ...] = (),
    ) -> None:
        self._run_unit = run_unit
        self._memory = memory
        self._wanted = max(1, processes)
        self._grace = grace
        self._context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
        if preload:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload([*preload])
        self._workers: list[_Worker] = []
        self._logs = ""

    def run(self, units: Iterable[Unit]) -> Iterator[Message]:
        """All messages, as they come. Closing the iterator ends all workers."""
        waiting = deque(units)
        with tempfile.TemporaryDirectory(prefix="gradparity-") as self._logs:
            try:
                while waiting or any(worker.unit for worker in self._workers):
                    self._assign(waiting)
                    yield from self._collect(waiting)
            finally:
                idle = [worker for worker in self._workers if worker.unit is None]
                for worker in idle:
                    worker.pipe.close()  # it ends by itself, and cleans up
                for worker in idle:
                    worker.process.join(GRACE)
                for worker in self._workers:
                    worker.kill()
                self._workers.clear()

    def _assign(self, waiting: deque[Unit]) -> None:
        """Gives units to idle workers, then to new ones.

        An idle worker that died meanwhile is replaced; a new one that is dead already loses its unit when its
        pipe is read.
        """
        for worker in [w for w in self._workers if w.unit is None]:
            if waiting and worker.give(waiting[0]):
                waiting.popleft()
            elif waiting:
                self._remove(worker)
        while waiting and len(self._workers) < self._wanted:
            self._workers.append(self._spawn())
            self._workers[-1].give(waiting.popleft())

    def _spawn(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        handle, log = tempfile.mkstemp(dir=self._logs, suffix=".log")
        os.close(handle)
        process = self._context.Process(target=worker_main, args=(theirs, self._run_unit, log), daemon=False)
        process.start()
        theirs.close()
        return _Worker(process, ours, Path(log))

    def _collect(self, waiting: deque[Unit]) -> Iterator[Message]:
        busy = {worker.pipe: worker for worker in self._workers if worker.unit is not None}
        ready = wait(list(busy), timeout=0.5 if self._memory is None else 0.1)
        for pipe in ready:
            worker = busy[pipe]  # type: ignore[index]
            yield from self._receive(worker, waiting)
        for worker in busy.values():
            limit = worker.limit
            is_silent = worker.unit is not None and worker.pipe not in ready
            if is_silent and limit is not None and limit.is_over(self._grace):
                detail = f"no answer within {limit.seconds:g} s, killed: {limit.describe()}"
                yield self._lose(worker, "timeout", detail, waiting)
            elif worker.unit is not None and self._memory is not None:
                held = resident_bytes(worker.process.pid)
                if held > self._memory:
                    detail = f"the worker held {held >> 20} MiB, allowed {self._memory >> 20} MiB; killed"
                    yield self._lose(worker, "out-of-memory", detail, waiting)

    def _receive(self, worker: _Worker, waiting: deque[Unit]) -> Iterator[Message]:
        unit = worker.unit
        assert unit is not None
        try:
            kind, step, data = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            yield self._lose(worker, "crash", self._last_words(worker), waiting)
            return
        if kind == "start":
            worker.step, worker.label = step, data
            worker.allow(data.get("limit", unit.timeout))
            yield Started(unit, step, data)
        elif kind == "result":
            worker.allow(unit.timeout, unit.overhead)
            worker.label = None
            yield Result(unit, step, data)
        else:
            yield from self._end(worker, unit, kind, data, waiting)

    def _end(
        self, worker: _Worker, unit: Unit, kind: str, data: dict[str, Any], waiting: deque[Unit]
    ) -> Iterator[Message]:
        again = kind == "retire" and data["again"] and worker.step is not None
        if kind == "retire":
            self._remove(worker)
        worker.unit = None
        if again and worker.step is not None:
            waiting.appendleft(unit.after(worker.step))
        else:
            yield Finished(unit, data.get("error", ""))

    def _lose(self, worker: _Worker, why: str, detail: str, waiting: deque[Unit]) -> Message:
        unit = worker.unit
        assert unit is not None
        self._remove(worker)
        worker.unit = None
        if worker.step is not None:
            waiting.appendleft(unit.after(worker.step))
        return Lost(unit, worker.step, worker.label, why, detail)

    def _remove(self, worker: _Worker) -> None:
        worker.kill()
        if worker in self._workers:
            self._workers.remove(worker)

    def _last_words(self, worker: _Worker) -> str:
        code = worker.process.exitcode
        how = (
            f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        )
        try:
            lines = [line for line in worker.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        if code == -signal.SIGKILL:
            how += " (not by us: so the system ends what takes its last memory)"
        return f"the worker ended with {how}" + (f"; it last wrote: {lines[-1][:200]}" if lines else "")


def resident_bytes(pid: int | None) -> int:
    """The memory that a process holds; 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
