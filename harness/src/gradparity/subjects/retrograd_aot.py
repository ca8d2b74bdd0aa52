"""retrograd's staged AOT pipeline as subjects: called directly, behind its live path, through torch.compile.

In: retrograd's backend for the graphs. Out: the subjects "retrograd-aot:eager|inductor[+cudagraphs]",
"retrograd-aot+dynamic:eager", "retrograd-live+retrograd-aot:eager", "retrograd-compile:eager|inductor",
"retrograd-compile+live:eager|inductor" and "retrograd-step:eager|inductor".
What Dynamo has lost before it calls a backend is stock's own, unless nobody would notice: the subject `stock`
runs Dynamo's graph as eager does.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from gradparity.errors import UnavailableError
from gradparity.subjects.base import Subject
from gradparity.subjects.places import backend_of, in_script
from gradparity.subjects.retrograd_live import RetrogradLive
from gradparity.subjects.stock import DynamoSubject, StockCompile

T = TypeVar("T")

BACKENDS = ("eager", "inductor")


class AotJournal:
    """What retrograd's AOT path did since `begin`: graphs compiled, calls run as eager runs them, and why.

    Raises UnavailableError when retrograd, or its AOT path, is not installed.
    """

    def __init__(self, name: str) -> None:
        imported("retrograd.aot", name)
        self._retrograd = imported("retrograd", name)
        self._counters: Counter[str] = self._retrograd.counters
        self._before: Counter[str] = Counter()
        self._reasons: Counter[Any] = Counter()

    def begin(self) -> None:
        """Remembers counters and reasons so far."""
        self._before = Counter(self._counters)
        self._reasons = Counter(self._ahead())

    def compiles(self) -> int:
        """Graphs given to a backend since `begin`."""
        return self._since("aot_compiles")

    def notes(self) -> tuple[str, ...]:
        """One note per reason for a fallback since `begin`; one if nothing was captured at all."""
        idle = () if self._since("aot_captures") else ("no function of this case was captured",)
        if not self._since("aot_fallbacks"):
            return idle
        reasons = Counter(self._ahead()) - self._reasons
        notes = [f"fallback: [{reason.code}] {str(reason).splitlines()[0]}" for reason in reasons]
        return (*(notes or ["fallback: no reason given"]), *idle)

    def _ahead(self) -> dict[Any, int]:
        """The reasons for which something ran eagerly that is no backward of the live path."""
        fallbacks = self._retrograd.explain().fallbacks
        return {reason: n for reason, n in fallbacks.items() if not reason.stage.startswith("live")}

    def _since(self, key: str) -> int:
        return int(self._counters[key] - self._before[key])


class RetrogradAot(Subject):
    """Functions and modules through retrograd.aot; their backward as the engine runs it."""

    accountable = True

    def __init__(self, name: str, backend: str, **options: Any) -> None:
        super().__init__(name)
        self.backend = self.place = backend
        self.bitwise = backend == "eager"
        self._options = {"dynamic": None, **options}
        self._retrograd = imported("retrograd", name)
        self._journal = AotJournal(name)

    @property
    def script(self) -> str:
        """As a user calls it."""
        words = "".join(f", {key}={value!r}" for key, value in self._options.items())
        imports, backend = in_script(self.backend)
        return (
            f"def by_subject(target):\n    import retrograd.aot\n\n{imports}"
            "    is_module = isinstance(target, torch.nn.Module)\n"
            "    compiler = retrograd.aot.module if is_module else retrograd.aot.function\n"
            f"    return compiler(target, backend={backend}{words})\n"
        )

    def compile(self, target: T) -> T:
        """The function or module behind all stages of the AOT path."""
        return compiled_ahead(target, backend=backend_of(self.backend), **self._options)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Eager's random numbers, and its rounding between operations of low precision, in Inductor's code
        too; nothing to set for the other backend."""
        if self.backend != "inductor":
            yield
            return
        with eager_numbers():
            yield

    def begin(self) -> None:
        """Remembers what the AOT path has done so far."""
        self._journal.begin()

    def compiles(self) -> int:
        """Graphs compiled since `begin`."""
        return self._journal.compiles()

    def notes(self) -> tuple[str, ...]:
        """Fallbacks since `begin`."""
        return self._journal.notes()

    def reset(self, cold: bool) -> None:
        """Caches stay warm between cases, as they do for users, unless a case asks."""
        if cold:
            self._retrograd.reset()


class RetrogradLiveOverAot(RetrogradLive):
    """Functions and modules through retrograd.aot; backward inside retrograd.compiled_autograd."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name, backend)
        self._journal = AotJournal(name)

    def compile(self, target: T) -> T:
        """The function or module behind all stages of the AOT path."""
        return compiled_ahead(target, backend=backend_of(self.backend))

    def begin(self) -> None:
        """Remembers what both paths have done so far."""
        super().begin()
        self._journal.begin()

    def compiles(self) -> int:
        """Segments lowered and graphs compiled since `begin`."""
        return super().compiles() + self._journal.compiles()

    def notes(self) -> tuple[str, ...]:
        """Fallbacks of both paths since `begin`."""
        return (*super().notes(), *self._journal.notes())


class RetrogradCompile(DynamoSubject):
    """torch.compile with the backend "retrograd"; plain backward. Its own options where none are named."""

    accountable = answers_for_silent = True

    def __init__(self, name: str, inner: str | None = None) -> None:
        super().__init__(name, "retrograd")
        imported("retrograd.dynamo", name)  # registers the backend where the package is not installed
        self.bitwise = inner == "eager"
        self.stock = StockCompile("stock-compile:eager", "eager")
        if inner == "inductor":
            self.rounds_as = StockCompile("stock-compile:inductor", "inductor")
        self.place = inner or ""
        self._retrograd = imported("retrograd", name)
        self._journal = AotJournal(name)

    @property
    def script(self) -> str:
        """As a user calls torch.compile."""
        imports, inner = in_script(self.place)
        words = f", options={{'backend': {inner}}}" if self.place else ""
        return (
            f"def by_subject(target):\n    import retrograd.dynamo\n\n{imports}"
            f"    return torch.compile(target, backend={self.backend!r}{words})\n"
        )

    def compile(self, target: T) -> T:
        """The function or module under torch.compile."""
        compiler: Any = torch.compile
        options = {"options": {"backend": backend_of(self.place)}} if self.place else {}
        compiled: T = compiler(target, backend=self.backend, **options)
        return compiled

    @contextmanager
    def around(self) -> Iterator[None]:
        """As with `RetrogradAot`: eager's random numbers and rounding."""
        with eager_numbers():
            yield

    def begin(self) -> None:
        """Remembers what Dynamo and the AOT path have done so far."""
        super().begin()
        self._journal.begin()

    def notes(self) -> tuple[str, ...]:
        """Fallbacks since `begin`."""
        return self._journal.notes()

    def reset(self, cold: bool) -> None:
        """Dynamo always forgets; retrograd keeps its caches, unless a case asks."""
        super().reset(cold)
        if cold:
            self._retrograd.reset()


class RetrogradWhole(RetrogradCompile):
    """retrograd.compile: the same, with the live path around each backward that comes from a call."""

    def compile(self, target: T) -> T:
        """The function or module under retrograd.compile."""
        compiled: T = self._retrograd.compile(target, backend=backend_of(self.place))
        return compiled

    def notes(self) -> tuple[str, ...]:
        """Fallbacks of both paths since `begin`."""
        reasons = Counter(self._backwards()) - self._live
        live = [f"fallback: [{reason.code}] {str(reason).splitlines()[0]}" for reason in reasons]
        return (*super().notes(), *live)

    def begin(self) -> None:
        """Remembers what both paths have done so far."""
        super().begin()
        self._live = Counter(self._backwards())

    def _backwards(self) -> dict[Any, int]:
        """The reasons for which a backward ran on the stock engine."""
        fallbacks = self._retrograd.explain().fallbacks
        return {reason: n for reason, n in fallbacks.items() if reason.stage in ("live.capture", "live.run")}


class RetrogradStep(RetrogradWhole):
    """retrograd.compile_step around whole training steps; programs without such a step run as eager does."""

    def compile(self, target: T) -> T:
        """The target itself: the step around it is what is compiled."""
        return target

    def training_step(self, step: Callable[..., T]) -> Callable[..., T]:
        """The step under retrograd.compile_step, with torch's own backward in it."""

        def whole(*args: Any) -> T:
            return step(torch.Tensor.backward, *args)

        compiled: Callable[..., T] = self._retrograd.compile_step(whole, backend=backend_of(self.place))
        return compiled

    def notes(self) -> tuple[str, ...]:
        """Fallbacks; nothing where a program has no step."""
        return tuple(note for note in super().notes() if note.startswith("fallback"))


def eager_numbers() -> AbstractContextManager[Any]:
    """Inductor's code draws and rounds as eager does."""
    import torch._inductor.config as inductor_config

    context: AbstractContextManager[Any] = inductor_config.patch(
        fallback_random=True, emulate_precision_casts=True
    )
    return context


def compiled_ahead(target: T, **options: Any) -> T:
    """`retrograd.aot.module` of a module, `retrograd.aot.function` of anything else."""
    aot = importlib.import_module("retrograd.aot")
    compiler: Any = aot.module if isinstance(target, torch.nn.Module) else aot.function
    compiled: T = compiler(target, **options)
    return compiled


def imported(module: str, name: str) -> Any:
    """A part of retrograd. Raises UnavailableError, which names the subject, if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"subject {name}", str(error), "pip install retrograd") from error
