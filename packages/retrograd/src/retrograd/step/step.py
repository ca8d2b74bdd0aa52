"""A training step that compiles itself as a whole.

In: a function that makes a training step, and the user's choices. Out: a callable that does the same. The
order of its levels stands in `CompiledStep.__call__`: a graph of the whole step; else pieces, with the
backward compiled; and why.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retrograd._torch import pytree
from retrograd._torch.fakes import why_not_fakeable
from retrograd._torch.rng import generator_states, restore_generator_states
from retrograd._torch.settings import global_hooks, settings_now, why_not_capturable
from retrograd._torch.stance import compile_stance
from retrograd.api import CompiledAutograd, compiled_autograd
from retrograd.backends.registry import find_backend
from retrograd.cache.call_guard import CallGuard
from retrograd.errors import CaptureError, FallbackWarning, Reason
from retrograd.events import counters
from retrograd.step.capture import Call, capture
from retrograd.step.guard import StepGuard, gathered
from retrograd.step.lower import lower
from retrograd.step.plan import Number
from retrograd.step.report import StepReport, WholeReport
from retrograd.step.run import CompiledStepGraph
from retrograd.step.snapshot import SCALARS, Snapshot
from retrograd.step.watch import Reached, TooMuchError

__all__ = ["CompiledStep", "StepConfig"]


@dataclass(frozen=True)
class StepConfig:
    """What the user chose; see `compile_step`."""

    backend: str | Callable[..., Any] = "inductor"
    dynamic: bool | None = None
    strict: bool = False
    recompile_limit: int = 8
    warm_up: int = 1


@dataclass(eq=False)
class _Entry:
    """One situation: what it is like, and the code for it (None: pieces, for `reason`)."""

    key: Any
    snapshot: Snapshot
    code: CompiledStepGraph | None
    reason: Reason | None = None
    guard: CallGuard | None = None
    report: WholeReport | None = None
    devices: tuple[torch.device, ...] = ()


def guard_of(leaves: Sequence[Any]) -> CallGuard | None:
    """A guard for arguments that cannot be captured; None for those that it cannot describe."""
    if any(isinstance(leaf, torch.Tensor) and why_not_fakeable(leaf) for leaf in leaves):
        return None
    return CallGuard.exact(leaves)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object, equal to itself only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _constants(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What the arguments are besides tensors, and which of the tensors are the same."""
    found: list[Any] = []
    first: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            found.append(first.setdefault(id(leaf), place))
        elif isinstance(leaf, float):
            found.append((type(leaf), leaf.hex()))
        else:
            found.append((type(leaf), leaf) if isinstance(leaf, SCALARS) else _Same(leaf))
    return tuple(found)


class CompiledStep:
    """A step that compiles itself. Made by `retrograd.compile_step`.

    Attributes:
        fn: the step. config: the choices.
    """

    def __init__(self, fn: Callable[..., Any], config: StepConfig) -> None:
        functools.update_wrapper(self, fn)
        self.__name__: str = getattr(fn, "__name__", type(fn).__name__)
        self.fn, self.config = fn, config
        self._backend = find_backend(config.backend)
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Forget what was compiled, and the report."""
        self._entries: list[_Entry] = []
        self._calls = self._captures = 0
        self._changed: dict[Any, dict[int, frozenset[int]]] = {}
        self._seen: dict[tuple[int, str], Number] = {}
        self._numbers: dict[tuple[int, str], Number] = {}
        self._pieces: CompiledAutograd = compiled_autograd(self.config.backend, dynamic=self.config.dynamic)
        self._report = StepReport(backwards=self._pieces.report)

    def explain(self) -> StepReport:
        """How its calls ran, and why."""
        return self._report

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        """A step that is a method: bound, with one compiled step per object."""
        if owner is None:
            return self
        bound = CompiledStep(self.fn.__get__(owner, cls), self.config)
        vars(owner)[self.fn.__name__] = bound
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step.

        Raises:
            CaptureError: it cannot be captured as a whole, if `strict`.
            Exception: whatever the step raises.
        """
        if torch.compiler.is_compiling() or compile_stance() == "force_eager":
            return self.fn(*args, **kwargs)
        with self._lock:
            is_early = self._calls < self.config.warm_up
            self._calls += is_early
        if is_early:
            self._report.eager += 1
            return self.fn(*args, **kwargs)
        if (why := why_not_capturable()) is not None:
            return self._in_pieces(self._reason("surroundings", why), args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (spec, settings_now(), _constants(leaves))
        with self._lock:
            entry, values = self._known(key, leaves)
            if entry is None:
                entry, values = self._captured(key, leaves, spec)
        if entry.code is None:
            assert entry.reason is not None
            return self._in_pieces(entry.reason, args, kwargs)
        return self._whole(entry, values, args, kwargs)

    def _known(self, key: Any, leaves: Sequence[Any]) -> tuple[_Entry | None, list[Any]]:
        """The entry for a call, and the inputs of its graph."""
        for entry in self._entries:
            if entry.key == key and entry.snapshot.fits():
                if entry.code is None:
                    if entry.guard is None or entry.guard.fits(leaves):
                        return entry, []
                elif (values := entry.code.guard.values(leaves)) is not None:
                    return entry, values
        return None, []

    def _whole(self, entry: _Entry, values: list[Any], args: Any, kwargs: Any) -> Any:
        assert entry.code is not None
        assert entry.report is not None
        states = generator_states(entry.devices)
        try:
            outputs = entry.code.compute(values)
        except Exception as error:
            counters["run_failures"] += 1
            restore_generator_states(states)
            return self._in_pieces(self._reason("run-failed", f"raises {type(error).__name__}"), args, kwargs)
        entry.report.runs += 1
        return entry.code.finish(values, outputs)

    def _in_pieces(self, reason: Reason, args: Any, kwargs: Any) -> Any:
        """Run it as Python does, with its backwards compiled."""
        if self.config.strict and reason.code != "run-failed":
            raise CaptureError(reason)
        if reason not in self._report.pieces:
            warnings.warn(f"{reason}\n  ran in pieces", FallbackWarning, stacklevel=4)
        self._report.pieces[reason] += 1
        counters["step_pieces"] += 1
        with self._pieces:
            return self.fn(*args, **kwargs)

    def _reason(self, code: str, text: str) -> Reason:
        return Reason(code, f"{self.__name__} {text}", "step")

    def _captured(self, key: Any, leaves: Sequence[Any], spec: Any) -> tuple[_Entry, list[Any]]:
        """A new entry for a call."""
        if self._captures >= self.config.recompile_limit:
            last = next((entry.reason for entry in reversed(self._entries) if entry.reason is not None), None)
            text = f"changed in more than {self.config.recompile_limit} ways"
            return _Entry(key, Snapshot(frozenset()), None, last or self._reason("recompile-limit", text)), []
        self._captures += 1
        because = self._because(key, leaves)
        try:
            objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            reached = Reached(self.fn, (*objects, global_hooks()), tensors)
            entry, values = self._compiled(key, leaves, spec, reached, because)
        except TooMuchError as error:
            entry, values = _Entry(key, Snapshot(frozenset()), None, self._reason("too-much", str(error))), []
        self._entries.append(entry)
        return entry, values

    def _compiled(
        self, key: Any, leaves: Sequence[Any], spec: Any, reached: Reached, because: str
    ) -> tuple[_Entry, list[Any]]:
        numbers = self._lifted(reached)
        apart = frozenset((id(number.group), number.key) for number in numbers)
        try:
            if reached.iterators:
                raise CaptureError(self._reason("iterator", f"may advance {reached.iterators[0]}"))
            if reached.wrappers:
                text = f"uses {reached.wrappers[0]}, which communicates between processes"
                raise CaptureError(self._reason("distributed", text))
            step = capture(Call(self.fn, leaves, spec, reached, self._symbolic(key, leaves), numbers))
            values = gathered(step, leaves)
            assert values is not None
            code = CompiledStepGraph(step, lower(self._backend, step), StepGuard(step, values))
        except CaptureError as error:
            return _Entry(key, reached.snapshot(None, apart), None, error.reason, guard=guard_of(leaves)), []
        except Exception as error:
            reason = self._reason("not-compiled", f"cannot be compiled: {type(error).__name__}: {error}")
            return _Entry(key, reached.snapshot(None, apart), None, reason, guard=guard_of(leaves)), []
        report = WholeReport(step.gm.graph, because, self._backend.name, tuple(n.path for n in numbers))
        self._report.wholes.append(report)
        return _Entry(
            key, reached.snapshot(step.names, apart), code, report=report, devices=step.devices
        ), values

    def _because(self, key: Any, leaves: Sequence[Any]) -> str:
        """Why a capture is needed; notes sizes that change."""
        for entry in self._entries:
            if entry.key == key and entry.code is not None and entry.snapshot.fits():
                if self.config.dynamic is None:
                    for place, dims in entry.code.guard.changed(leaves).items():
                        known = self._changed.setdefault(key, {})
                        known[place] = known.get(place, frozenset()) | dims
                return entry.code.guard.why_not(leaves)
        return "what it reaches has changed" if self._entries else "first use"

    def _symbolic(self, key: Any, leaves: Sequence[Any]) -> dict[int, frozenset[int]]:
        if self.config.dynamic:
            tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            return {i: frozenset(range(tensor.dim())) for i, tensor in tensors}
        return self._changed.get(key, {})

    def _lifted(self, reached: Reached) -> list[Number]:
        """The numbers of optimizers' groups that have changed since they were first seen, and rates for which
        there is a schedule."""
        for group, path in reached.groups:
            for name, value in group.items():
                if type(value) is float:
                    place = (id(group), name)
                    known = self._seen.setdefault(place, Number(group, name, f"{path}[{name!r}]", value))
                    if known.first != value or (name == "lr" and "initial_lr" in group):
                        self._numbers[place] = known
        here = {id(group) for group, _ in reached.groups}
        return [
            n for (place, _), n in self._numbers.items() if place in here and type(n.group[n.key]) is float
        ]
