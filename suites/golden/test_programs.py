"""What a compiler makes of twenty small programs, as text that a person can read.

The texts stand in `suites/golden/texts`. A change of the compiler that is not meant to change what it makes
must leave them as they are. `EXPECTTEST_ACCEPT=1`, without xdist, writes what is made now. The texts are
those of the torch that development happens on: other releases trace other operators.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import retrograd
from golden.programs import AHEAD, LIVE
from retrograd import aot
from retrograd.events import LOGS
from retrograd.graph.emit import Emitter
from unit.retrograd.aot.joint_graphs import text

TEXTS = Path(__file__).with_name("texts")
ROOT = TEXTS.parents[2]
PINNED = re.search(r"torch==([\d.]+)", (ROOT / "requirements/torch.txt").read_text())[1]

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(PINNED), reason=f"the texts are those of torch {PINNED}"
)


class Listener(logging.Handler):
    """Keeps what a log says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What the live path says of its graphs and schedules meanwhile."""
    listener, logs = Listener(), [LOGS[name] for name in ("graph", "schedule")]
    levels = [log.level for log in logs]
    for log in logs:
        log.addHandler(listener)
        log.setLevel(logging.DEBUG)
    yield listener.texts
    for log, level in zip(logs, levels, strict=True):
        log.removeHandler(listener)
        log.setLevel(level)


def check(name: str, found: str) -> None:
    """Compare with the kept text, or write it, if it is to be accepted."""
    path, found = TEXTS / f"{name}.txt", re.sub(r"\bbackward !\d+", "backward", found.rstrip()) + "\n"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.write_text(found)
    assert found == path.read_text()


@pytest.mark.parametrize("program", LIVE, ids=lambda program: program.__name__)
def test_a_backward(program, monkeypatch) -> None:
    """The graph in eager's order, the schedule, and the function that the plan becomes."""
    retrograd.reset()
    functions: list[str] = []
    function = Emitter.function

    def kept(emit: Emitter):
        functions.append("\n".join(emit.lines))
        return function(emit)

    monkeypatch.setattr(Emitter, "function", kept)
    with heard() as texts, retrograd.compiled_autograd(backend="eager"):
        for _ in range(2):
            for loss in program():
                loss.backward()
    plans = [source for source in functions if "def run_backward(" in source]
    assert plans
    check(f"live_{program.__name__}", "\n\n".join(texts + plans))


@pytest.mark.parametrize("name", AHEAD)
def test_the_stages(name: str) -> None:
    """The joint graph with its roles, and both halves of the partition."""
    fn, args, dynamic = AHEAD[name]
    joint = aot.capture(aot.create_state(fn, args, dynamic=dynamic))
    partition = aot.partition(joint, "min_cut")
    parts = [joint.print_readable(sources=False), f"forward\n{text(partition.forward)}"]
    parts += [f"backward {number}\n{text(part.gm)}" for number, part in enumerate(partition.backwards)]
    check(f"ahead_{name}", "\n\n".join(part.rstrip() for part in parts))


def test_every_text_belongs_to_a_program() -> None:
    names = {f"live_{program.__name__}" for program in LIVE} | {f"ahead_{name}" for name in AHEAD}
    assert {path.stem for path in TEXTS.glob("*.txt")} == names
