"""Threads against each other: each does one thing again and again, all at the same moments.

A `Meeting` brings them together before each round, and again in the middle of each backward, inside a hook.
What a thread computes is compared, bit for bit, with what it computed alone before; what has to be compiled
must have been.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import retrograd
from retrograd import aot

ROUNDS = 24
Meet = Callable[..., None]


class Meeting:
    """Where threads wait for each other; nobody waits for long, because some hold what others wait for."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)

    def __call__(self, *_: Any) -> None:
        try:
            self._barrier.wait(0.05)
        except threading.BrokenBarrierError:
            self._barrier.reset()


def alone(*_: Any) -> None:
    """Instead of a meeting."""


class Worker:
    """One thread's work. `run` is what it does in a round, `check` what must be true in the end."""

    is_exact = True

    def run(self, number: int, meet: Meet) -> list[Tensor]:
        """A round; results to compare."""
        raise NotImplementedError

    def eager(self, number: int) -> list[Tensor]:
        """The same without anything of ours."""
        return self.run(number, alone)

    def check(self, rounds: int) -> None:
        """Nothing ran otherwise than it should."""


class Stock(Worker):
    """Backwards that nobody captures, with hooks that come and go. The graph changes with the round."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        self._use_reentrant = use_reentrant

    def run(self, number: int, meet: Meet) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        w = torch.randn(4, 4, generator=generator, requires_grad=True)
        seen: list[Tensor] = []

        def layer(h: Tensor) -> Tensor:
            return torch.tanh(h @ w) * 0.5 + h

        def on_h(grad: Tensor) -> Tensor:
            meet()
            handle = w.register_hook(lambda g: seen.append(g.clone()))
            if number % 2:
                handle.remove()
            return grad * 2

        h = torch.randn(3, 4, generator=generator) @ w
        for _ in range(1 + number // 4 % 3):
            again = self._use_reentrant
            h = layer(h) if again is None else checkpoint(layer, h, use_reentrant=again)
        h.register_hook(on_h)
        h.sin().sum().backward()
        assert w.grad is not None
        return [w.grad, *seen]


class Live(Stock):
    """The same inside a context of this thread."""

    def __init__(self, backend: str, use_reentrant: bool | None = None) -> None:
        super().__init__(use_reentrant)
        self.is_exact = backend == "eager"
        self._context = retrograd.compiled_autograd(backend=backend)

    def run(self, number: int, meet: Meet) -> list[Tensor]:
        with self._context:
            return super().run(number, meet)

    def eager(self, number: int) -> list[Tensor]:
        return super().run(number, alone)

    def check(self, rounds: int) -> None:
        report = self._context.explain()
        runs = sum(one.runs for one in report.backwards) + sum(report.fallbacks.values())
        assert [str(reason) for reason in report.fallbacks if reason.code != "engine-busy"] == []
        assert runs >= rounds, report


class Optimizers(Worker):
    """Steps of torch's optimizers, with a hook on each step."""

    def run(self, number: int, meet: Meet) -> list[Tensor]:
        weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=bool(number % 2))
        optimizer.register_step_post_hook(meet)
        for scale in (1.0, 2.0):
            optimizer.zero_grad()
            (weight * scale).square().sum().backward()
            optimizer.step()
        return [weight.detach().clone()]


class Ahead(Worker):
    """Functions that are captured and compiled anew every fourth round."""

    def __init__(self, compiler: Callable[..., Any], is_exact: bool = True) -> None:
        self._compiler, self.is_exact = compiler, is_exact
        self._fns: dict[int, Any] = {}

    def run(self, number: int, meet: Meet) -> list[Tensor]:
        return self._step(
            self._fns.setdefault(number // 4, self._compiler(_function(number // 4))), number, meet
        )

    def eager(self, number: int) -> list[Tensor]:
        return self._step(_function(number // 4), number, alone)

    def _step(self, fn: Any, number: int, meet: Meet) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        w = torch.randn(4, 4, generator=generator, requires_grad=True)
        w.register_hook(lambda grad: meet())
        one, other = fn(w, torch.randn(3, 4, generator=generator))
        (one.sum() + other.square().sum()).backward()
        assert w.grad is not None
        return [w.grad]


def _function(power: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda w, x: (torch.tanh(x @ w) ** (2 + power), x.sin() @ w)


WORKERS: dict[str, Callable[[], Worker]] = {
    "stock": Stock,
    "stock, reentrant checkpoints": lambda: Stock(use_reentrant=True),
    "live": lambda: Live("eager"),
    "live, lowered": lambda: Live("aten"),
    "live, checkpoints": lambda: Live("eager", use_reentrant=False),
    "optimizers": Optimizers,
    "ahead": lambda: Ahead(partial(aot.function, backend="eager", strict=True)),
    "ahead, lowered": lambda: Ahead(partial(aot.function, backend="aten", strict=True), is_exact=False),
    "Dynamo": lambda: Ahead(partial(torch.compile, backend="retrograd", options={"backend": "eager"})),
}


#: while Dynamo compiles, a flag of torch has the optimizers of all threads compute as if compiled.
CREWS = [[name for name in WORKERS if name != left_out] for left_out in ("Dynamo", "optimizers")]


def against_each_other(crew: list[str], seconds: float) -> int:
    """Rounds that the slowest thread made."""
    workers = {name: WORKERS[name]() for name in crew}
    expected = {name: [worker.eager(n) for n in range(ROUNDS)] for name, worker in workers.items()}
    meet, errors, rounds = Meeting(len(workers)), list[str](), dict.fromkeys(workers, 0)
    end = time.monotonic() + seconds

    def work(name: str, worker: Worker) -> None:
        compare: Any = partial(
            torch.testing.assert_close, **({"rtol": 0, "atol": 0} if worker.is_exact else {})
        )
        try:
            while not errors and (time.monotonic() < end or rounds[name] < ROUNDS):
                number = rounds[name] % ROUNDS
                meet()
                compare(worker.run(number, meet), expected[name][number])
                rounds[name] += 1
            worker.check(rounds[name])
        except Exception as error:
            errors.append(f"{name}, round {rounds[name]}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=item) for item in workers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return min(rounds.values())


@pytest.fixture(autouse=True)
def _often_switched() -> Iterator[None]:
    """Python goes from thread to thread after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setswitchinterval, before)
        stack.callback(retrograd.reset)
        yield


@pytest.mark.parametrize("crew", CREWS, ids=["optimizers", "Dynamo"])
def test_threads_do_not_meet_in_what_they_compute(crew: list[str]) -> None:
    assert against_each_other(crew, 0) >= ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("crew", CREWS, ids=["optimizers", "Dynamo"])
def test_threads_for_a_minute(crew: list[str]) -> None:
    assert against_each_other(crew, 60) >= ROUNDS


def test_a_hook_stays_where_another_one_of_its_number_is_removed() -> None:
    """torch numbers handles without a lock: hooks of two threads may get the same one."""
    x, seen = torch.ones(2, requires_grad=True), list[Tensor]()

    def on_h(grad: Tensor) -> None:
        number = RemovableHandle.next_id
        x.register_hook(seen.append)
        RemovableHandle.next_id = number  # as in another thread that has read it meanwhile
        torch.ones(1, requires_grad=True).register_hook(lambda grad: None).remove()

    h = x * 2
    h.register_hook(on_h)
    with retrograd.compiled_autograd(backend="eager"):
        h.sin().sum().backward()
    assert len(seen) == 1
