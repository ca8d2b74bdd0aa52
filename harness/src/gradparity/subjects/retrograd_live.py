"""The only door to retrograd: its live path as subjects.

In: a backend of retrograd, and options of its live path. Out: subjects "retrograd-live:eager",
"retrograd-live:aten", "retrograd-live:inductor", "retrograd-live:inductor+cudagraphs".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gradparity.errors import UnavailableError
from gradparity.subjects.base import Subject
from gradparity.subjects.places import backend_of, in_script

BACKENDS = ("eager", "aten", "inductor")


class RetrogradLive(Subject):
    """Backward inside retrograd.compiled_autograd; eager forward.

    Raises UnavailableError when retrograd is not installed.
    """

    accountable = True

    def __init__(self, name: str, backend: str, **options: Any) -> None:
        super().__init__(name)
        self.backend = self.place = backend
        self._options = options
        self.bitwise = backend == "eager"
        self._retrograd = _load(name)
        self._before: Counter[str] = Counter()
        self._reasons: Counter[Any] = Counter()

    @property
    def script(self) -> str:
        """As a user calls it."""
        words = "".join(f", {key}={value!r}" for key, value in self._options.items())
        imports, backend = in_script(self.backend)
        return (
            f"def around_backward():\n    import retrograd\n\n{imports}"
            f"    return retrograd.compiled_autograd(backend={backend}{words})\n"
        )

    def backward(self) -> AbstractContextManager[Any]:
        """Every backward inside is compiled by retrograd."""
        context: AbstractContextManager[Any] = self._retrograd.compiled_autograd(
            backend=backend_of(self.backend), **self._options
        )
        return context

    @contextmanager
    def around(self) -> Iterator[None]:
        """Eager's random numbers in Inductor's code too; nothing to set for the other backends."""
        if self.backend != "inductor":
            yield
            return
        import torch._inductor.config as inductor_config

        with inductor_config.patch(fallback_random=True):
            yield

    def begin(self) -> None:
        """Remembers retrograd's counters and its reasons for fallbacks so far."""
        self._before = Counter(self._retrograd.counters)
        self._reasons = Counter(self._backwards())

    def compiles(self) -> int:
        """Segments lowered since `begin`."""
        return self._since("lowerings")

    def notes(self) -> tuple[str, ...]:
        """One note per reason for a fallback, or why a segment has no code, since `begin`; one if no plan of
        retrograd's ran at all."""
        idle = () if self._since("runs") else ("no backward of this case was compiled",)
        given_up = self._given_up() if self._since("segments_given_up") else ()
        if not self._since("fallbacks"):
            return (*given_up, *idle)
        reasons = Counter(self._backwards()) - self._reasons
        notes = [f"fallback: [{reason.code}] {str(reason).splitlines()[0]}" for reason in reasons]
        return (*(notes or ["fallback: no reason given"]), *given_up, *idle)

    def _backwards(self) -> dict[Any, int]:
        """The reasons for which a backward ran on the stock engine."""
        fallbacks = self._retrograd.explain().fallbacks
        return {reason: n for reason, n in fallbacks.items() if reason.stage in ("live.capture", "live.run")}

    def _given_up(self) -> Iterator[str]:
        """A note for each reason why a segment has no code, in the newest backward that has such segments."""
        for backward in reversed(self._retrograd.explain().backwards):
            reasons = dict.fromkeys(one.because for one in backward.lowerings if one.is_interpreted)
            if reasons:
                yield from (f"fallback: [segment-not-compiled] {reason}" for reason in reasons)
                return

    def reset(self, cold: bool) -> None:
        """Caches stay warm between cases, as they do for users, unless a case asks."""
        if cold:
            self._retrograd.reset()

    def _since(self, key: str) -> int:
        return int(self._retrograd.counters[key] - self._before[key])


def _load(name: str) -> Any:
    try:
        import retrograd
    except ImportError as error:
        raise UnavailableError(f"subject {name}", str(error), "pip install retrograd") from error
    return retrograd
