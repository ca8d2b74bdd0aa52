"""Steady steps of several ways to train one model, which take turns on one device.

In: a model of `TRAINED`, ways of `WAYS`, a device. Out: what a step of each way takes, and what it takes of
stock's step in the same round.

The speed of a machine drifts by more than the ways differ. So every way stays, and in each round they make a
few steps one after the other, while the rest wait. Each has a process of its own, which tells memory too; or
all are in this process: where the host is the limit, two processes that do the same differ by a quarter. As a
program this is such a process: it reads numbers of steps, a line each, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryFile
from typing import IO, Any

from .fresh import PACKAGE, SETTINGS, python_path

#: Steps of a turn that are not counted: the device and the processor's caches come from another process.
AWAKENING = 2
#: What other ways are compared with, round by round: the first of these that is there. Under autocast, stock
#: computes as eager does only if it is told so.
YARDSTICKS = ("stock-like-eager", "stock")


class Trainee:
    """A process that trains by one way, and waits between its turns."""

    def __init__(self, way: str, process: subprocess.Popen[str], said: IO[str]) -> None:
        self.way, self._process, self._said = way, process, said

    def answer(self) -> Any:
        """What it says next; None if it has ended, and what it said last is printed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._said.seek(0)
        print(f"{self.way} failed:\n{self._said.read()[-2000:]}", file=sys.stderr, flush=True)
        return None

    def ask(self, steps: int) -> Any:
        """The seconds of each of so many steps; of none, the figures of the end."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its last words follow
            print(steps, file=self._process.stdin, flush=True)
        return self.answer()


@contextmanager
def trainee(way: str, model: str, device: str) -> Iterator[Trainee]:
    """One that begins to compile now."""
    with (
        TemporaryFile("w+") as said,
        subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE.name}.turns", way, model, device],
            env={**os.environ, **SETTINGS, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process,
    ):
        try:
            yield Trainee(way, process, said)
        finally:
            process.kill()


def in_turns(
    model: str,
    ways: Sequence[str],
    device: str = "cpu",
    rounds: int = 12,
    steps: int = 10,
) -> dict[str, float]:
    """Train `model` by each of `ways`; all processes start at once.

    Arguments:
        model: a name of `TRAINED`.
        ways: names of `WAYS`.
        device: "cpu" or "cuda".
        rounds: how often each has its turn.
        steps: how many steps of a turn are counted.

    Returns:
        for each way that did not fail: "WAY step", the median in seconds over all rounds; "WAY least", the
        shortest step; "WAY of stock", the median over the rounds of its step to that of the first of
        `YARDSTICKS`, with "WAY low" and "WAY high", the quarters of these ratios; and what
        `training.Training` says at its end.
    """
    with ExitStack() as stack:
        trainees = [stack.enter_context(trainee(way, model, device)) for way in ways]
        started = [(one, one.answer()) for one in trainees]
        first = {one.way: said for one, said in started if said is not None}
        present = [one for one in trainees if one.way in first]
        seconds = _rounds(present, rounds, steps)
        last = {one.way: one.ask(0) for one in present if one.way in seconds}
    others = {way: {"loss": first[way]["loss"]} | (last[way] or {}) for way in seconds}
    return _figures(seconds, others)


class Neighbour:
    """One that trains in this process."""

    def __init__(self, way: str, model: str, device: str) -> None:
        from .training import Training

        self.way, self._training = way, Training(way, model, device)

    def ask(self, steps: int) -> list[float]:
        """The seconds of each of so many steps."""
        return [self._training.step() for _ in range(steps)]


def together(
    model: str, ways: Sequence[str], device: str = "cpu", rounds: int = 12, steps: int = 10
) -> dict[str, float]:
    """As `in_turns`, in this process and without what `training.Training` says at its end. One way at most
    compiles live: the engine's cache of captured graphs is one for the whole process."""
    import torch._dynamo

    # Every way compiles the same code of the model.
    many = {"recompile_limit": 64, "accumulated_recompile_limit": 1024}
    with torch._dynamo.config.patch(many):
        neighbours = [Neighbour(way, model, device) for way in ways]
        seconds = _rounds(neighbours, rounds, steps)
    return _figures(seconds, {})


def _figures(
    seconds: Mapping[str, Sequence[Sequence[float]]], others: Mapping[str, dict[str, float]]
) -> dict[str, float]:
    """By way and name: what the steps of each round took, and `others`."""
    yardstick = next((seconds[way] for way in YARDSTICKS if way in seconds), None)
    return {
        f"{way} {name}": value
        for way, turns in seconds.items()
        for name, value in (_summary(turns, yardstick) | others.get(way, {})).items()
    }


def _rounds(
    trainees: Sequence[Trainee] | Sequence[Neighbour], rounds: int, steps: int
) -> dict[str, list[list[float]]]:
    """The steps of each turn by way; another one begins each round. Without those that ended on the way."""
    seconds: dict[str, list[list[float]]] = {one.way: [] for one in trainees}
    for number in range(rounds):
        for place in range(len(trainees)):
            one = trainees[(number + place) % len(trainees)]
            if one.way not in seconds:
                continue
            turn = one.ask(AWAKENING + steps)
            if turn is None:
                del seconds[one.way]
            else:
                seconds[one.way].append(turn[AWAKENING:])
    return seconds


def _summary(
    turns: Sequence[Sequence[float]], yardstick: Sequence[Sequence[float]] | None
) -> dict[str, float]:
    steps = [step for turn in turns for step in turn]
    found = {"step": statistics.median(steps), "least": min(steps)}
    if yardstick is not None:
        pairs = zip(turns, yardstick, strict=True)
        ratios = [statistics.median(turn) / statistics.median(other) for turn, other in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found |= {"of stock": middle, "low": low, "high": high}
    return found


def main(way: str, model: str, device: str, asked: Iterable[str] = sys.stdin) -> None:
    """Train, and answer what is asked."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        import torch

        from .training import Training

        torch.set_num_threads(1)
        one = Training(way, model, device)
        print(json.dumps(one.first), file=answers, flush=True)
        for line in asked:
            steps = int(line)
            said: Any = [one.step() for _ in range(steps)] if steps else one.last()
            print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
