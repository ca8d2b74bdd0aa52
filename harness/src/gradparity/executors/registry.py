"""Names of executors.

In: a number of processes and `Resources`. Out: an Executor: this process, local processes, or a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gradparity.errors import UnknownNameError
from gradparity.executors.inprocess import InProcess
from gradparity.executors.local import Local
from gradparity.executors.ray_cluster import RayCluster
from gradparity.executors.unit import Message, RunUnit, Unit

NAMES = ("local", "ray")


@dataclass(frozen=True)
class Resources:
    """Where units run: `executor` is one of NAMES; `address` is a Ray cluster's; `gpus` is the share of a GPU
    that one unit takes there; `memory` is the most bytes that a local worker may hold; `preload` names
    modules that one process imports for all local workers, which are forks of it (none: each worker imports
    what it needs). A fork cannot use a GPU that the process before it used.
    """

    executor: str = "local"
    address: str | None = None
    gpus: float = 0.0
    memory: int | None = None
    preload: tuple[str, ...] = ()


class Executor(Protocol):
    """Somewhere units run."""

    def run(self, units: Iterable[Unit]) -> Iterator[Message]:
        """All messages, as they come. Closing the iterator ends everything that was started."""


def executor(run_unit: RunUnit, processes: int, grace: float, resources: Resources) -> Executor:
    """The executor that these resources ask for. Raises UnknownNameError."""
    if resources.executor not in NAMES:
        raise UnknownNameError("executor", resources.executor, list(NAMES))
    if resources.executor == "ray":
        return RayCluster(run_unit, processes, resources.address, resources.gpus, grace)
    if processes == 0:
        return InProcess(run_unit)
    return Local(run_unit, processes, grace, resources.memory, resources.preload)
