"""Worker processes on several machines, through Ray.

In: a module-level function and units. Out: messages. A worker is an actor: one that crashes or hangs is
replaced alone, and the rest of its unit goes to another. A step whose worker died is tried once more,
because a machine that goes away looks the same from here; only what dies twice is lost. Nothing counts
twice: each attempt has a number, and what an attempt says that was given up is not heard.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gradparity.errors import UnavailableError
from gradparity.executors.ray_worker import Mailbox, Worker
from gradparity.executors.unit import Finished, Lost, Message, Result, RunUnit, Started, Unit
from gradparity.limit import BACKSTOP

PATIENCE = 120.0
"""Seconds that the cluster has to find room for the first worker."""

START = 900.0
"""Seconds that the first worker has to come up in a cluster that is large enough."""

PAUSE = 0.05
"""Seconds between two looks into the mailbox."""

Order = tuple[Unit, bool]
"""A unit, and whether a worker died already at its first step, or before it."""


@dataclass
class _Hired:
    """One actor, and what it works on. `ready` resolves when the cluster has found room for it."""

    actor: Any
    ready: Any
    attempt: int = 0
    order: Order | None = None
    answer: Any = None
    step: int | None = None
    label: dict[str, Any] | None = None
    limit: float = 0.0
    deadline: float = 0.0

    def allow(self, limit: float, more: float = 0.0) -> None:
        """Sets the time by which the worker has to say something. Nobody here knows how busy its machine is,
        so it is the one that a busy machine has.
        """
        self.limit, self.deadline = limit, time.monotonic() + BACKSTOP * limit + more


class RayCluster:
    """A pool of actors.

    Arguments: the function that runs a unit, the number of workers, the cluster's address (None: the one
    that this process knows, else a new one here), the share of a GPU for each worker, and the grace period.
    """

    def __init__(
        self, run_unit: RunUnit, workers: int, address: str | None, gpus: float, grace: float
    ) -> None:
        self._run_unit = run_unit
        self._wanted = max(1, workers)
        self._address, self._gpus, self._grace = address, gpus, grace
        self._ray: Any = None
        self._mailbox: Any = None
        self._hired: list[_Hired] = []
        self._attempts = itertools.count(1)

    def run(self, units: Iterable[Unit]) -> Iterator[Message]:
        """All messages, as they come. Closing the iterator ends all workers; the cluster stays."""
        waiting: deque[Order] = deque((unit, False) for unit in units)
        self._connect()
        began = time.monotonic()
        try:
            while waiting or any(worker.order for worker in self._hired):
                self._hire(len(waiting))
                if self._assign(waiting):
                    began = float("inf")
                elif time.monotonic() - began > (START if self._is_large_enough() else PATIENCE):
                    raise self._no_room()
                yield from self._heard()
                yield from self._ended(waiting)
                time.sleep(PAUSE)
        finally:
            for worker in list(self._hired):
                self._dismiss(worker)
            self._ray.kill(self._mailbox)

    def _connect(self) -> None:
        try:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        except ImportError as error:
            raise UnavailableError("executor ray", str(error), "pip install 'gradparity[ray]'") from error
        self._ray = ray
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, log_to_driver=False, include_dashboard=False)
            except ConnectionError as error:
                raise UnavailableError(
                    f"the Ray cluster {self._address}", str(error), "ray start --head; then its address"
                ) from error
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox = ray.remote(num_cpus=0, scheduling_strategy=here)(Mailbox).remote()

    def _hire(self, waiting: int) -> None:
        """Asks for as many workers as there is work for; the cluster may take its time."""
        busy = sum(worker.order is not None for worker in self._hired)
        kind = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0)(Worker)
        while len(self._hired) < min(self._wanted, busy + waiting):
            actor = kind.remote(self._run_unit, self._mailbox)
            self._hired.append(_Hired(actor, actor.ready.remote()))

    def _assign(self, waiting: deque[Order]) -> bool:
        """Gives work to workers that are there and idle. Returns whether any worker is at work."""
        for worker in [item for item in self._hired if item.order is None]:
            if not waiting or not self._ray.wait([worker.ready], timeout=0)[0]:
                continue
            worker.attempt, worker.order = next(self._attempts), waiting.popleft()
            unit = worker.order[0]
            worker.step = worker.label = None
            worker.allow(unit.timeout, unit.overhead)
            worker.answer = worker.actor.serve.remote(unit, worker.attempt)
        return any(worker.order is not None for worker in self._hired)

    def _heard(self) -> Iterator[Message]:
        """What workers said since the last look; of attempts that were given up, nothing."""
        by_attempt = {worker.attempt: worker for worker in self._hired if worker.order is not None}
        for attempt, kind, step, data in self._ray.get(self._mailbox.take.remote()):
            worker = by_attempt.get(attempt)
            if worker is None or worker.order is None:
                continue
            unit = worker.order[0]
            if kind == "start":
                worker.step, worker.label = step, data
                worker.allow(data.get("limit", unit.timeout))
                yield Started(unit, step, data)
            else:
                worker.label = None
                worker.allow(unit.timeout, unit.overhead)
                yield Result(unit, step, data)

    def _ended(self, waiting: deque[Order]) -> Iterator[Message]:
        """Units that are done, and workers that died or must be ended."""
        busy = {worker.answer: worker for worker in self._hired if worker.order is not None}
        if not busy:
            return
        done, _ = self._ray.wait(list(busy), num_returns=len(busy), timeout=0)
        if done:
            yield from self._heard()  # all that was said before the answer
        for answer in done:
            yield from self._answered(busy[answer], waiting)
        for worker in self._hired[:]:
            if worker.order is not None and time.monotonic() > worker.deadline + self._grace:
                why = f"no answer within {worker.limit:g} s; killed"
                yield from self._lose(worker, "timeout", why, waiting)

    def _answered(self, worker: _Hired, waiting: deque[Order]) -> Iterator[Message]:
        assert worker.order is not None
        unit = worker.order[0]
        try:
            fit, why_not = self._ray.get(worker.answer)
        except self._ray.exceptions.OutOfMemoryError as error:
            yield from self._lose(worker, "out-of-memory", _first_line(error), waiting)
            return
        except self._ray.exceptions.RayError as error:
            again = _once_more(worker)
            if again is None:
                yield from self._lose(worker, "crash", _first_line(error), waiting)
            else:
                self._dismiss(worker)
                waiting.appendleft(again)
            return
        worker.order = None
        if not fit:
            self._dismiss(worker)
        if not fit and worker.step is not None and not why_not:
            waiting.appendleft((unit.after(worker.step), False))
        else:
            yield Finished(unit, why_not)

    def _lose(self, worker: _Hired, why: str, detail: str, waiting: deque[Order]) -> Iterator[Message]:
        assert worker.order is not None
        unit = worker.order[0]
        self._dismiss(worker)
        if worker.step is not None:
            waiting.appendleft((unit.after(worker.step), False))
        yield Lost(unit, worker.step, worker.label, why, detail)

    def _dismiss(self, worker: _Hired) -> None:
        worker.order = None
        self._ray.kill(worker.actor)
        self._hired.remove(worker)

    def _is_large_enough(self) -> bool:
        """Whether the whole cluster, as it is now, has what one worker takes."""
        there = self._ray.cluster_resources()
        return bool(there.get("CPU", 0) >= 1 and there.get("GPU", 0) >= self._gpus)

    def _no_room(self) -> UnavailableError:
        there = self._ray.cluster_resources()
        wanted = f"1 CPU and {self._gpus:g} GPU"
        what = f"after {PATIENCE:g} s the cluster has no room for {wanted}"
        if self._is_large_enough():
            what = f"after {START:g} s no worker with {wanted} has come up"
        return UnavailableError(
            "a Ray worker", f"{what}; it has {there}", "fewer --processes, or a smaller --gpus-per-worker"
        )


def _once_more(worker: _Hired) -> Order | None:
    """What is left of a dead worker's unit; None if that died already where it died now."""
    assert worker.order is not None
    unit, died = worker.order
    if worker.step is None:
        return None if died else (unit, True)
    if worker.label is None:
        return unit.after(worker.step), False
    return None if died and worker.step == unit.start else (unit.after(worker.step - 1), True)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"the worker died: {lines[0] if lines else type(error).__name__}"[:300]
