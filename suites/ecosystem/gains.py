"""What a step of each example takes: in eager, under stock ``torch.compile``, and under retrograd.

In: a device, names of examples. Out: a JSON file of medians and ratios, by example and way. Run it from
`suites`:

    python -m ecosystem.gains --device cuda --out FILE.json

Each way has a process of its own. All compile at once, and then they take turns, because the speed of a
machine drifts. A way that fails, a package that is absent, and an example for which no time is left, have a
reason in the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

EXAMPLES = (
    "trainer",
    "accelerate_loop",
    "lightning_fit",
    "sft",
    "optimizer_in_backward",
    "differential_privacy",
    "forces",
)
WAYS = ("eager", "stock", "live", "compile")
#: arguments of `train` by device.
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "cpu": {name: {"width": 32, "layers": 2, "batch": 4} for name in EXAMPLES},
    "cuda": {
        "trainer": {"width": 512, "layers": 6, "batch": 8},
        "accelerate_loop": {"width": 64, "layers": 12, "batch": 32},
        "lightning_fit": {"width": 256, "layers": 8, "batch": 32},
        "sft": {"width": 512, "layers": 6, "batch": 8},
        "optimizer_in_backward": {"width": 1024, "layers": 8, "batch": 8},
        "differential_privacy": {"width": 512, "layers": 6, "batch": 256},
        "forces": {"width": 32, "layers": 2, "batch": 32},
    },
}
SIZES["cpu"]["forces"] = {"width": 4, "layers": 2, "batch": 6}
#: steps before the clock, and steps of a turn: those that are not counted, and those that are.
WARM_UP, AWAKENING, COUNTED = 12, 2, 8
ROUNDS = 8
ENDLESS = 1_000_000


#: examples whose libraries look at the model itself, so that it is compiled in place.
IN_PLACE = ("trainer", "sft")


def prepared(way: str, example: str) -> tuple[Callable[[Any], Any], AbstractContextManager[Any]]:
    """What an example prepares its model by, and the context that it is trained in."""
    if way == "eager":
        return lambda model: model, nullcontext()
    if way == "stock":
        library, options = importlib.import_module("torch"), {}
    else:
        library, options = importlib.import_module("retrograd"), {"backend": "retrograd"}
        importlib.import_module("retrograd.dynamo")  # registers the backend, also if nothing is installed
    if way == "live":
        return lambda model: model, library.compiled_autograd()

    def in_place(model: Any) -> Any:
        model.compile(**options)
        return model

    return in_place if example in IN_PLACE else library.compile, nullcontext()


class Clock:
    """Called after each step of an optimizer: waits until somebody asks, and answers with seconds of steps.

    Of several optimizers the first to step counts. A request for no steps ends the process.
    """

    def __init__(self, device: str, answer: Callable[[Any], None]) -> None:
        self._device, self._answer = device, answer
        self._optimizer: Any = None
        self._seconds: list[float] = []
        self._missing, self._is_warm = WARM_UP, False
        self._last = time.perf_counter()

    def __call__(self, optimizer: Any, args: object, kwargs: object) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self._synchronize()
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        if len(self._seconds) == self._missing:
            self._report()
        self._last = time.perf_counter()

    def _synchronize(self) -> None:
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()

    def _report(self) -> None:
        self._answer(self._seconds[AWAKENING:] if self._is_warm else {"start": sum(self._seconds[:3])})
        if not self._is_warm and self._device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
        self._is_warm, self._seconds = True, []
        self._missing = int(sys.stdin.readline() or 0)
        if not self._missing:
            self._answer(self._end())
            os._exit(0)

    def _end(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if "retrograd.api" in sys.modules:
            reasons = sys.modules["retrograd"].explain().fallbacks
            found["fallbacks"] = sorted({reason.code for reason in reasons})
        if self._device == "cuda":
            import torch

            found["allocated"] = torch.cuda.max_memory_allocated()
        return found


def train(example: str, way: str, device: str) -> None:
    """Train one example by one way, and answer what is asked on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(found: Any) -> None:
        print(json.dumps(found), file=answers, flush=True)

    try:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        module = importlib.import_module(f"ecosystem.{example}")
        prepare, context = prepared(way, example)
        register_optimizer_step_post_hook(Clock(device, answer))
        with context:
            module.train(prepare, device, steps=ENDLESS, **SIZES[device][example])
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        answer({"missing": f"{type(error).__name__}: {first[:200]}"})
        raise


class Trainee:
    """The process of one way."""

    def __init__(self, example: str, way: str, device: str, entered: ExitStack) -> None:
        self.way = way
        self._messages = entered.enter_context(TemporaryFile())  # noqa: SIM115 - the stack closes it
        command = [sys.executable, "-m", "ecosystem.gains", "--train", example, way, "--device", device]
        self._process = entered.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages, bufsize=0,
                cwd=Path(__file__).parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip
        entered.callback(self._process.kill)

    def ask(self, steps: int) -> None:
        """Have it make so many steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % steps)

    def answer(self, until: float) -> Any:
        """What it answers, or a dictionary with the key "missing"."""
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], max(0.0, until - time.monotonic()))[0]:
            self._process.kill()
            return {"missing": "it took longer than there was time"}
        if line := output.readline():
            return json.loads(line)
        self._messages.seek(0)
        last = self._messages.read().decode(errors="replace").strip().splitlines()
        return {"missing": f"it ended: {(last or ['without a word'])[-1][:200]}"}


def measured(example: str, device: str, until: float, rounds: int, ways: Sequence[str]) -> dict[str, Any]:
    """Figures of each way of an example, or the reason why there are none."""
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as entered:
        trainees = [Trainee(example, way, device, entered) for way in ways]
        for one in trainees:
            found[one.way] = one.answer(until)
        running = [one for one in trainees if "missing" not in found[one.way]]
        turns: dict[str, list[float]] = {one.way: [] for one in running}
        for number in range(rounds):
            for place in range(len(running)):
                one = running[(number + place) % len(running)]
                one.ask(AWAKENING + COUNTED)
                turn = one.answer(until)
                if isinstance(turn, dict):
                    return found | {one.way: turn}
                turns[one.way].append(statistics.median(turn))
        for one in running:
            one.ask(0)
            found[one.way] |= one.answer(until) | {"step": statistics.median(turns[one.way])}
            found[one.way] |= {
                f"of {other}": statistics.median(map(float.__truediv__, turns[one.way], turns[other]))
                for other in ("eager", "stock")
                if other in turns
            }
    return found


def machine(device: str) -> dict[str, str]:
    """What was measured on."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"device": name, "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the file after each example."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=sorted(SIZES))
    parser.add_argument("--out", type=Path, help="the JSON file; without it, the figures are printed")
    parser.add_argument("--seconds", type=float, default=350.0, help="time for all examples together")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--way", action="append", choices=WAYS, help="may be given several times; else all")
    parser.add_argument(
        "--example", action="append", choices=EXAMPLES, help="may be given several times; else all"
    )
    parser.add_argument("--train", nargs=2, metavar=("EXAMPLE", "WAY"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train:
        train(*given.train, given.device)
        return
    end, examples = time.monotonic() + given.seconds, given.example or EXAMPLES
    figures = {"machine": machine(given.device), "examples": {}}
    for place, example in enumerate(examples):
        now = time.monotonic()
        share = now + (end - now) / (len(examples) - place)
        figures["examples"][example] = measured(example, given.device, share, given.rounds, given.way or WAYS)
        print(
            example, json.dumps(figures["examples"][example]), f"{time.monotonic() - now:.0f} s", flush=True
        )
        if given.out:
            given.out.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
