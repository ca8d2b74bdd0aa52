"""Small programs and helpers shared by the tests of gradparity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gradparity import finds
from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.executors import registry
from gradparity.executors.inprocess import InProcess
from gradparity.executors.local import Local
from gradparity.executors.unit import RunUnit
from gradparity.observe import observe
from gradparity.oracles.evidence import Evidence, Reference
from gradparity.outcome import Outcome
from gradparity.probe import Body, Probe
from gradparity.subjects.eager import Eager

HERE = Path(__file__).parent
CASE = Case("test", "program", None, 3)
CPU = torch.device("cpu")


def hooked(p: Probe) -> None:
    """Two leaves, a hook on each of two intermediates, one value."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    w = p.leaf("w", p.randn(4, 2, requires_grad=True))
    y = x @ w
    z = y.tanh()
    y.register_hook(p.hook("y"))
    z.register_hook(p.hook("z"))
    p.value("z", z)
    with p.backward():
        z.sum().backward()


@dataclass(frozen=True)
class Bench:
    """Runs bodies in eager and builds evidence from outcomes."""

    case: Case = CASE

    def outcome(self, body: Body, dtype: torch.dtype = torch.float32) -> Outcome:
        return observe(self.case, body, Eager("eager"), dtype, CPU)

    def program(self, body: Body, **known: object) -> Program:
        return Program(self.case, body, **known)  # type: ignore[arg-type]

    def evidence(
        self, eager: Outcome, subject: Outcome, bitwise: bool = True, body: Body | None = None
    ) -> Evidence:
        def reference() -> Reference:
            return (
                Reference(self.outcome(body, torch.float64)) if body else Reference(None, "none in this test")
            )

        return Evidence(eager, subject, bitwise, reference=reference)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def hooked_body() -> Callable[[Probe], None]:
    return hooked


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Workers are forks of one process that imported torch. Those that import it themselves, as they do where
    nothing else is asked for, are the subject of the tests of `Local`."""

    def local(run_unit: RunUnit, processes: int, grace: float, memory: int | None, preload: object) -> Local:
        return Local(run_unit, processes, grace, memory, ("torch", "torch._dynamo"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "Local", local)
        yield


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands for one case run it here: that a worker protects them is a test of its own."""
    monkeypatch.setattr(finds, "executor", lambda run_unit, *more: InProcess(run_unit))
