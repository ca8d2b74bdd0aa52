"""What workers do in tests of executors. Nothing of gradparity is imported here, so that workers start soon.

In: a unit, and where to say what happens. Out: whether the process is fit for more.
"""

from __future__ import annotations

import os
import time
from typing import Any


def three_steps(unit: Any, emit: Any) -> bool:
    """Three steps; the process is unfit after the second, once."""
    for step in range(unit.start, 3):
        emit("start", step, {})
        emit("result", step, {"step": step})
        if step == 1:
            return False
    return True


def processes(unit: Any, emit: Any) -> bool:
    """Two steps, each of which tells its process."""
    for step in range(unit.start, 2):
        emit("start", step, {})
        emit("result", step, {"pid": os.getpid()})
        if unit.payload["fresh"] and step < 1:
            return False
    return True


def greedy(unit: Any, emit: Any) -> bool:
    """The first step takes ever more memory; the second is modest."""
    for step in range(unit.start, 2):
        emit("start", step, {"case": f"c::{step}"})
        held = []
        while step == 0:
            held.append(bytearray(os.urandom(1 << 24)))
            time.sleep(0.01)
        emit("result", step, {})
    return True


def computing(unit: Any, emit: Any) -> bool:
    """A step that never ends, and always computes."""
    emit("start", 0, {"case": "c::0"})
    while unit.start == 0:
        pass
    return True


def sleeping(unit: Any, emit: Any) -> bool:
    """A step that takes one second and uses no processor."""
    emit("start", 0, {"case": "c::0"})
    time.sleep(1.0)
    emit("result", 0, {})
    return True


def progress(unit: Any, emit: Any) -> bool:
    """Two steps that show a bar, as Inductor does; the process is unfit after the first, so it is killed."""
    from tqdm.auto import tqdm

    for step in range(unit.start, 2):
        emit("start", step, {})
        emit("result", step, {"sum": sum(tqdm([1, 2], disable=None))})
        if step == 0:
            return False
    return True
