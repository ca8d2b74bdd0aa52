"""limit: how long one case may take.

In: seconds, the process that works on the case. Out: whether the time is up, and how busy the machine was.
The limit is one on the processor time of the process. On a machine that is not busy it holds for the clock on
the wall as well: a case that has used less hangs. On a busy one, the wall may show `BACKSTOP` times as much.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

BACKSTOP = 4.0


class Limit:
    """A limit that begins now.

    Args:
        seconds: of processor time.
        pid: the process that works; None: this one.
    """

    def __init__(self, seconds: float, pid: int | None = None) -> None:
        self.seconds, self._pid = seconds, pid
        self._began, self._before = time.monotonic(), processor_seconds(pid)

    @property
    def wall(self) -> float:
        """Seconds since the limit began."""
        return time.monotonic() - self._began

    @property
    def used(self) -> float:
        """Seconds of processor time since then, with those of child processes that have ended."""
        return processor_seconds(self._pid) - self._before

    def is_over(self, grace: float = 0.0) -> bool:
        """Whether the time is up, and so many seconds more."""
        wall = self.wall - grace
        return wall >= self.seconds and (
            wall >= BACKSTOP * self.seconds or self.used >= self.seconds or not is_busy()
        )

    def describe(self) -> str:
        """What the case had of the machine, for a message about its end."""
        share = 100 * self.used / max(self.wall, 1e-9)
        return (
            f"it had {self.used:.1f} s of processor time in {self.wall:.1f} s ({share:.0f} %); "
            f"load average {os.getloadavg()[0]:.1f} on {processors()} processors"
        )


def processor_seconds(pid: int | None = None) -> float:
    """Seconds that processors spent on a process and on its children that have ended; 0 where the system does
    not tell of another process.
    """
    if pid is None:
        return sum(os.times()[:4])
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Whether more wants to run than there are processors."""
    return os.getloadavg()[0] > processors()
