"""The inside of a worker process: takes units from a pipe, runs them, sends what happens.

In: a pipe and a function. Out: tuples (kind, step, data) on the pipe; kinds are "start", "result",
"finished", "retire".
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from gradparity.executors.unit import RunUnit, Unit, why

MEMORY_LIMIT_KIB = 6 * 1024 * 1024
"""A worker that ever held more than this is replaced after its unit."""


def worker_main(pipe: Connection, run_unit: RunUnit, log: str) -> None:
    """Serves units until the pipe closes. All output goes to the file `log`, so that a crash leaves a
    trace.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect(log)
    _limit_threads()
    _lock_bars_among_threads()

    def emit(kind: str, step: int, data: dict[str, Any]) -> None:
        pipe.send((kind, step, data))

    while True:
        try:
            unit = pipe.recv()
        except (EOFError, OSError):
            return
        _serve(unit, run_unit, emit)


def _serve(unit: Unit, run_unit: RunUnit, emit: Any) -> None:
    try:
        fit = run_unit(unit, emit)
    except Exception as error:  # a unit that cannot even be set up is reported, not fatal
        emit("finished", -1, {"error": why(error)})
        return
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if not fit:
        emit("retire", -1, {"again": True})
    elif used > MEMORY_LIMIT_KIB:
        emit("retire", -1, {"again": False})
    else:
        emit("finished", -1, {"error": ""})


def _redirect(log: str) -> None:
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process


def _limit_threads() -> None:
    import faulthandler

    import torch

    faulthandler.enable()
    torch.set_num_threads(1)


def _lock_bars_among_threads() -> None:
    """Inductor shows tqdm's bars. Their usual lock has a semaphore for several processes, which a worker that
    is killed leaves behind: Python warns of it at the end.
    """
    with suppress(ImportError):
        importlib.import_module("tqdm.std").tqdm.set_lock(threading.RLock())
