"""Programs whose graph is another one at each step: what does that cost, and does the process grow?

In: a subject. Out: seconds of a backward beside eager's, or what is allocated. Each structure is a chain of
two operations in the order of a number's bits.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext

import torch

from .growth import allocated_bytes
from .subjects import SUBJECTS, Context

#: so many backwards are captured before a program that never repeats is left to the engine.
DOZEN = 12


def loss_of(number: int, x: torch.Tensor) -> torch.Tensor:
    """A loss whose graph has a structure of its own."""
    for bit in format(number + 4096, "b"):
        x = x.sin() if bit == "1" else x.tanh()
    return (x @ x).sum()


def backward(number: int, x: torch.Tensor, context: Context) -> float:
    """Seconds of one backward."""
    x.grad, loss = None, loss_of(number, x)
    start = time.perf_counter()
    with context():
        loss.backward()
    return time.perf_counter() - start


def cost_of_new_structures(subject: str, structures: int = 500, size: int = 256) -> dict[str, float]:
    """Median seconds of a backward that is met for the first time, after a dozen; eager takes turns."""
    context, x = SUBJECTS[subject](), torch.randn(size, size, requires_grad=True)
    for number in range(DOZEN):
        backward(number, x, context)
    seconds: dict[str, list[float]] = {"eager": [], subject: []}
    for number in range(1000, 1000 + structures):
        seconds["eager"].append(backward(number, x, nullcontext))
        seconds[subject].append(backward(number, x, context))
    return {name: statistics.median(values) for name, values in seconds.items()}


def growth_by_structures(subject: str, kept: int = 512, structures: int = 2048) -> dict[str, int]:
    """Bytes and objects that are left after ``reset()``, when the cache of structures was full and after
    `structures` more; and the objects that were held just before, by a cache that is then as full."""
    import retrograd

    context, x = SUBJECTS[subject](), torch.randn(4, 4, requires_grad=True)
    counts: dict[str, int] = {}

    def count(when: str) -> None:
        retrograd.reset()
        gc.collect()
        counts.update({f"bytes {when}": allocated_bytes("cpu"), f"objects {when}": len(gc.get_objects())})

    for when, first, last in (("before", 0, kept), ("after", kept, kept + structures)):
        for number in range(first, last):
            backward(number, x, context)
        most = len(gc.get_objects())
        count(when)
        counts[f"objects held {when}"] = most
    return counts
