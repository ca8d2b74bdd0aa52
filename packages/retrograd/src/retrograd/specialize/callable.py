"""A callable that compiles itself for each kind of call.

In: a key, the flat inputs, and functions that compile for them and that run them in eager mode. Out: the
result; fallbacks are told to a `Report`. Code is reused if its key is equal and its guard holds for the
inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from retrograd.config import Config
from retrograd.errors import CaptureError, CodeFailedError, NotReadyError, Reason, UnlikeTracedError
from retrograd.policy import MOST_FAILURES
from retrograd.process import ForkSafeLock
from retrograd.report import Report, reason_of, why_failed
from retrograd.runtime.modes import way_out_of, why_not_capturable_now
from retrograd.specialize.guard import CallGuard


class Code(Protocol):
    """The compiled code for one kind of call."""

    def __call__(self, leaves: Sequence[Any], /) -> Any:
        """The result for flat inputs."""

    def why_disabled(self) -> Reason | None:
        """Why calls should run in eager mode from now on; None if they should not."""


@dataclass(eq=False)
class Variant:
    """The cache entry of one kind of call.

    Attributes:
        guard: selects the calls with its key that it serves; None if it serves all of them.
        run: the code, called with flat inputs. None if such calls run in eager mode, for `reason`.
        reason: why such calls run in eager mode.
        failures: how often the code raised when eager did not.
        used: when it was last used, on the clock of its cache.
        outcome: completes the call for which the variant was made, if tracing has already run part of it.
    """

    guard: CallGuard | None
    run: Code | None
    reason: Reason | None = None
    failures: int = 0
    used: int = 0
    outcome: Callable[[], Any] | None = None


class Specialized:
    """The variants of one callable, by key. Of those with one key, we use the first whose guard holds. If
    there are more than ``cache_size``, we drop the least recently used one.

    Args:
        name: of the callable, for reasons.
        stage: of the callable, for reasons.
        config: its ``strict``, ``recompile_limit`` and ``cache_size`` are used here.
        report: is told what runs in eager mode.
        compile: makes the variant for flat inputs, given the variants with the same key, oldest first. It
            raises if the call cannot be captured and no guard can describe such calls.
    """

    def __init__(
        self,
        name: str,
        stage: str,
        config: Config,
        report: Report,
        compile: Callable[[Hashable, Sequence[Any], Sequence[Variant]], Variant],
    ) -> None:
        self._name, self._stage, self._config, self._report = name, stage, config, report
        self._compile = compile
        self._variants: dict[Hashable, list[Variant]] = {}
        self._clock = itertools.count()
        self._lock = ForkSafeLock()

    def __call__(self, key: Hashable, leaves: Sequence[Any], eagerly: Callable[[], Any]) -> Any:
        """The result for `leaves`. `eagerly` runs the call in eager mode.

        Raises:
            RetrogradError: in strict mode, if the call cannot be captured.
            Exception: whatever the callable raises.
        """
        variant = self._found(key, leaves)
        if variant is None:
            try:
                variant, outcome = self._made(key, leaves)
            except Exception as error:
                if self._config.strict:
                    raise
                return self.run_eagerly(reason_of(error, self._stage), eagerly)
            if outcome is not None:
                if variant.run is not None:
                    return outcome()
                eagerly = outcome
        run = variant.run
        if run is not None and not self._config.strict and (disabled := run.why_disabled()) is not None:
            run, variant.run, variant.reason = None, None, disabled
        if run is None:
            assert variant.reason is not None
            return self.run_eagerly(variant.reason, eagerly)
        try:
            return run(leaves)
        except UnlikeTracedError as error:  # raised by the first call, before it mutated anything
            variant.run, variant.reason = None, error.reason
            return self.run_eagerly(error.reason, eagerly)
        except NotReadyError as error:
            return self.run_eagerly(error.reason, eagerly)
        except CodeFailedError as error:
            return self._after_failure(variant, error, eagerly)

    def why_not_now(self, has_seen_functions: bool = False) -> Reason | None:
        """Why this thread's modes do not allow compiled code; see `why_not_capturable_now`."""
        now = why_not_capturable_now(has_seen_functions)
        return None if now is None else Reason(*now, self._stage, way_out=way_out_of(now[0]))

    def run_eagerly(self, reason: Reason, eagerly: Callable[[], Any]) -> Any:
        """The result of `eagerly`, which we report. Strict mode raises instead. ``force_eager`` reports
        nothing.

        Raises:
            CaptureError: in strict mode.
        """
        if reason.code == "force-eager":
            return eagerly()
        if self._config.strict:
            raise CaptureError(reason)
        result = eagerly()
        self._report.fell_back(reason, f"a call of {self._name} ran eagerly")
        return result

    def add(self, key: Hashable, variant: Variant) -> None:
        """Add `variant` to the cache."""
        variant.used = next(self._clock)
        kept = {**self._variants, key: [*self._variants.get(key, ()), variant]}
        if sum(map(len, kept.values())) > self._config.cache_size:
            oldest = min(itertools.chain(*kept.values()), key=lambda one: one.used)
            kept = {k: [one for one in ones if one is not oldest] for k, ones in kept.items()}
        self._variants = {k: ones for k, ones in kept.items() if ones}

    def clear(self) -> None:
        """Drop all variants."""
        self._variants = {}

    def _found(self, key: Hashable, leaves: Sequence[Any]) -> Variant | None:
        for variant in self._variants.get(key, ()):
            if variant.guard is None or variant.guard.fits(leaves):
                variant.used = next(self._clock)
                return variant
        return None

    def _made(self, key: Hashable, leaves: Sequence[Any]) -> tuple[Variant, Callable[[], Any] | None]:
        """A new variant, or the one that another thread made meanwhile; and the call's outcome, if it ran."""
        with self._lock:
            if (found := self._found(key, leaves)) is not None:
                return found, None
            known = self._variants.get(key, [])
            if len(known) >= self._config.recompile_limit:
                text = f"{self._name} was called with more kinds of input than recompile_limit"
                way_out = "dynamic=True, or a larger recompile_limit"
                reason = Reason("recompile-limit", text, self._stage, way_out=way_out)
                return Variant(known[-1].guard, None, reason), None
            made = self._compile(key, leaves, known)
            outcome, made.outcome = made.outcome, None
            self.add(key, made)
            return made, outcome

    def _after_failure(self, variant: Variant, error: CodeFailedError, eagerly: Callable[[], Any]) -> Any:
        """Handle code that raised. If eager raises too, the program is at fault; otherwise, the code is."""
        cause = error.__cause__ or error
        if self._config.strict:
            raise cause
        result = eagerly()
        variant.failures += 1
        reason = why_failed(f"the compiled code of {self._name}", cause, self._stage)
        if variant.failures >= MOST_FAILURES and not isinstance(cause, torch.OutOfMemoryError):
            variant.run, variant.reason = None, reason
        self._report.fell_back(reason, f"a call of {self._name} ran eagerly")
        return result
