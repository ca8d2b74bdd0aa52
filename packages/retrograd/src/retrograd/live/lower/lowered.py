"""One lowering of a boxed function, and how it was made.

In: what tracing and the backend returned. Out: called with values that fit, the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from retrograd._torch.log import profiling
from retrograd._torch.state import ThreadModes, without_torch_functions
from retrograd._torch.subclass import SubclassBorder
from retrograd._torch.trace import InputGuard
from retrograd.backends.background import Later
from retrograd.backends.base import Backend, Boxed
from retrograd.config import Config
from retrograd.errors import Reason
from retrograd.events import live_log
from retrograd.live.lower.derivatives import Differentiable
from retrograd.live.plan_log import PlanLog
from retrograd.repeats.lift_scalars import Family
from retrograd.report import LoweringReport


@dataclass(eq=False)
class Lowered:
    """One lowering: code, and what must hold for its use.

    Attributes:
        guard, modes: must hold. run: the backend's code, which takes the arguments at `fed` and whose results
            stand at `given`. graph: the ATen graph. border: flattens tensor subclasses, if there are any.
        differentiable: records what was run, for a derivative; None where eager would record nothing.
        has_run: whether it has run. is_deterministic: whether eager has run in its place, and had no error to
            raise about an operation that is not deterministic.
        later: the code, while it is compiled in the background.
    """

    guard: InputGuard
    modes: ThreadModes
    run: Boxed
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    graph: fx.Graph
    border: SubclassBorder | None
    differentiable: Differentiable | None = None
    has_run: bool = False
    is_deterministic: bool = False
    later: Later | None = None

    def guards(self) -> str:
        """What must hold, for the report."""
        return str(self.guard) if self.border is None else f"{self.border}; {self.guard}"

    @property
    def is_direct(self) -> bool:
        """Whether its code may be called without anything around it: plain tensors in and out, and proven."""
        return self.border is None and self.differentiable is None and self.later is None and self.has_run

    def flat(self, args: list[Any]) -> list[Any] | None:
        """The values that its code takes, if `args` fit; None if they do not."""
        flat = args if self.border is None else self.border.enter(args)
        return flat if flat is not None and self.guard.check(flat) else None

    @without_torch_functions
    def __call__(self, args: list[Any], flat: list[Any], run: Boxed) -> list[Any]:
        """The outputs, computed by `run`, which is its code, perhaps recorded; both lists are emptied."""
        if self.differentiable is None:
            return self._outputs(args, flat, run)
        values = list(args)
        with torch.no_grad():
            results = self._outputs(args, flat, run)
        return self.differentiable(results, values)

    def _outputs(self, args: list[Any], flat: list[Any], run: Boxed) -> list[Any]:
        passed = {} if self.border is None else self.border.passed_through(args)
        inputs = [flat[i] for i in self.fed]
        args.clear()
        flat.clear()
        results = run(inputs)
        outputs = [None if place is None else results[place] for place in self.given]
        return outputs if self.border is None else self.border.exit(outputs, passed)


@dataclass(eq=False)
class Lowerings:
    """The results of lowering one function, for all that run the same one.

    Attributes:
        codes: the newest first.
        interpret_because: why it cannot be lowered; None if it could be, or has not been tried.
        family: functions that differ from it only in their numbers, and `numbers`, its own.
    """

    codes: list[Lowered] = field(default_factory=list)
    interpret_because: str | None = None
    family: Family | None = None
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True)
class BoxedFunction:
    """A function that is lowered.

    Attributes:
        run: the function as captured.
        noted: the same, to be traced: its ATen nodes are to name autograd nodes.
        ranged: the same, under a profiler: its autograd nodes get the ranges that eager gives them.
        range: around its compiled code, under a profiler.
    """

    run: Boxed
    noted: Boxed
    ranged: Boxed
    range: Callable[[], AbstractContextManager[Any]]

    def interpreted(self, args: list[Any]) -> Sequence[Any]:
        """Its outputs, computed as captured; `args` is emptied."""
        return self.ranged(args) if profiling() else self.run(args)


@dataclass(frozen=True)
class How:
    """How a function is lowered, and what to call it.

    Attributes:
        number: place of the segment that it belongs to among the segments of its schedule.
        names: the autograd nodes in it.
        config, backend: how to lower it.
        log: is told every lowering.
        role: what it is to the segment; empty for the segment itself.
    """

    number: int
    names: tuple[str, ...]
    config: Config
    backend: Backend
    log: PlanLog
    role: str = ""

    def reason(self, text: str, way_out: str) -> Reason:
        """Why it is not compiled."""
        names = ", ".join(self.names[:3])
        return Reason("segment-not-compiled", text, "live.lower", node=names, way_out=way_out)

    def tell(
        self, how: str, guards: str, because: str, graph: fx.Graph | None = None, recompile: bool = False
    ) -> None:
        """Report a lowering. The arguments are those of `LoweringReport`."""
        because = f"{self.role}: {because}" if self.role else because
        live_log.debug("segment %d: %s, %s", self.number, how, because)
        self.log.lowered(LoweringReport(self.number, how, guards, because, graph, recompile))
