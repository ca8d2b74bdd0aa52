"""Interrupts: what an exception that arrives between any two instructions leaves behind.

In: a program under a subject. Out: a Finding if a switch of torch's stays otherwise where eager, or stock
torch below the subject, puts it back; if the engine is held afterwards; or if the next run differs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from gradparity.corpus.base import Program
from gradparity.observe import observe
from gradparity.oracles.evidence import Evidence
from gradparity.oracles.judge import judge
from gradparity.outcome import Outcome
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import Finding, Verdict

WARM = 3
TRIES = 25
PATIENCE = 20.0
"""Seconds that a small backward on another thread may take."""

ENTRANCES = {("torch._tensor", "backward"), ("torch.autograd", "backward"), ("torch.autograd", "grad")}
OTHERS = ("torch.utils.", "torch.nn.")
"""What torch does in Python on behalf of hooks and checkpoints."""

Run = Callable[[], object]
State = Callable[[], dict[str, Any]]
Counts = Callable[[FrameType], bool]


class Interrupt(BaseException):
    """What is delivered."""


@dataclass(frozen=True)
class Delivered:
    """How many interrupts there were; of the last one: where it was, and what it left otherwise."""

    count: int
    place: str = ""
    left: tuple[str, ...] = ()


def interrupts(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Interrupts the backwards of warm runs of the program."""
    is_backward = partial(_is_of_a_backward, theirs=(program.body.__module__, "gradparity"))

    def run(by: Subject = subject) -> Outcome:
        return observe(program.case, program.body, by, torch.float32, device)

    def found(by: Subject, tries: int) -> Delivered:
        return deliver(lambda: partial(run, by), switches, tries, is_backward)

    for _ in range(WARM):
        before = run()
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        first = found(subject, TRIES)
        if first.left and not set(first.left) <= set(found(subject.stock or Eager("eager"), 4 * TRIES).left):
            reason = f"an exception in {first.place} leaves otherwise: {', '.join(first.left)}"
            return Finding(Verdict.DIVERGE, "interrupt", reason)
    if not engine_is_free(run):
        return Finding(Verdict.DIVERGE, "interrupt engine", "another thread cannot run it afterwards")
    after = judge(Evidence(before, run(), bitwise=True, own_random=subject.own_random))
    if after.verdict is Verdict.AGREE:
        return None
    reason = f"the run after exceptions differs from the one before: {after.reason}"
    return Finding(Verdict.DIVERGE, f"interrupt {after.symptom}", reason)


def _is_of_a_backward(frame: FrameType | None, theirs: tuple[str, ...]) -> bool:
    """Whether a frame works for a backward, and not for a hook or a checkpoint in it: there, an exception
    between two instructions of a `with` leaves things behind in eager, too.
    """
    outermost = ("", "")
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name in theirs or name.partition(".")[0] in theirs:
            break
        if name.startswith(OTHERS):
            return False
        outermost, frame = (name, frame.f_code.co_name), frame.f_back
    return outermost in ENTRANCES


def deliver(
    prepared: Callable[[], Run], state: State, tries: int | None = None, counts: Counts = lambda _: True
) -> Delivered:
    """Interrupts at so many instructions, or at each, until something is left behind."""
    total, _ = interrupt_at(prepared(), 0, counts)
    step = 1 if tries is None else max(total // tries, 1)
    numbers, place = range((step + 1) // 2, total + 1, step), ""
    for count, number in enumerate(numbers, 1):
        run, before = prepared(), state()
        _, place = interrupt_at(run, number, counts)
        after = state()
        if left := tuple(key for key, value in before.items() if after[key] != value):
            return Delivered(count, f"{place} ({number} of {total})", left)
    return Delivered(len(numbers), place)


def interrupt_at(run: Run, number: int, counts: Counts = lambda _: True) -> tuple[int, str]:
    """Runs until instruction `number` of the frames that count, which raises; says how far it came, and where
    it was then. Number 0 is never reached. Frames of `logging` never count: between two instructions of
    theirs, a handler would keep its lock, and every other thread would wait.
    """
    count, place = 0, ""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count, place
        if event == "call" and (frame.f_globals.get("__name__") == "logging" or not counts(frame)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
            if count == number:
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}, instruction {frame.f_lasti}"
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except (Interrupt, Exception) as error:
        error.__traceback__ = None
    finally:
        sys.settrace(before)
    return count, place


def switches() -> dict[str, Any]:
    """What torch switches for a thread."""
    c: Any = torch._C
    return {
        "grad mode": torch.is_grad_enabled(),
        "multithreading of the engine": c._is_multithreading_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "function modes": (c._get_torch_function_state(), c._len_torch_function_stack()),
        "dispatch modes": c._len_torch_dispatch_stack(),
        "transforms": c._functorch.maybe_current_level(),
        "autocast": c._is_any_autocast_enabled(),
        "dtype": torch.get_default_dtype(),
        "hooks of saved tensors": c._autograd._saved_tensors_hooks_is_enabled(),
        "included keys": str(c._dispatch_tls_local_include_set()),
        "excluded keys": str(c._dispatch_tls_local_exclude_set()),
        "frames": c._dynamo.eval_frame.get_eval_frame_callback(),
        "tracing": (torch._guards.TracingContext.try_get(), torch._guards.CompileContext.try_get()),
    }


def engine_is_free(run: Run) -> bool:
    """Whether a backward on another thread ends, and what was interrupted does there, too."""

    def both() -> None:
        (torch.ones(1, requires_grad=True) * 2).backward()
        run()

    thread = threading.Thread(target=both, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()
