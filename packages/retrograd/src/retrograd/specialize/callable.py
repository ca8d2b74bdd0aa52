"""A callable that compiles itself for each kind of call that it meets.

In: a key, the flat inputs, and functions that compile for them and that run them eagerly. Out: the result,
and what happened in a `Report`. Code is found again by the key, which must be equal, and a guard, which must
hold for the inputs.
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
from retrograd.runtime.modes import why_not_capturable_now
from retrograd.specialize.guard import CallGuard


class Code(Protocol):
    """What was compiled for one kind of call."""

    def __call__(self, leaves: Sequence[Any], /) -> Any:
        """The result for flat inputs."""

    def why_disabled(self) -> Reason | None:
        """Why calls had better run eagerly from now on; None if they had not."""


@dataclass(eq=False)
class Variant:
    """What is known about one kind of call.

    Attributes:
        guard: when it applies, of the calls with its key; None: to all of them.
        run: the code, for flat inputs; None: such calls run eagerly, for `reason`.
        failures: how often the code has raised where eager did not.
        used: when it was used last, on the clock of its cache.
        outcome: what the call does that it was made for, if that has run already.
    """

    guard: CallGuard | None
    run: Code | None
    reason: Reason | None = None
    failures: int = 0
    used: int = 0
    outcome: Callable[[], Any] | None = None


class Specialized:
    """The variants of one callable, by key; of those of one key, the first whose guard holds is taken. When
    there are more than ``cache_size``, the one that was not used for longest is given up.

    Args:
        name: of the callable, for reasons. stage: where it stands.
        config: ``strict``, ``recompile_limit`` and ``cache_size`` count here.
        report: is told what runs eagerly.
        compile: makes the variant for flat inputs, given the variants of the same key, the oldest first;
            raises if they cannot be captured and no guard can describe them.
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
        """The result for `leaves`; `eagerly` runs them as eager does.

        Raises:
            RetrogradError: in strict mode, if they cannot be captured.
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
        except UnlikeTracedError as error:  # in the first call, before anything was changed
            variant.run, variant.reason = None, error.reason
            return self.run_eagerly(error.reason, eagerly)
        except NotReadyError as error:
            return self.run_eagerly(error.reason, eagerly)
        except CodeFailedError as error:
            return self._after_failure(variant, error, eagerly)

    def why_not_now(self, has_seen_functions: bool = False) -> Reason | None:
        """Why the modes of this thread allow no compiled code; see `why_not_capturable_now`."""
        now = why_not_capturable_now(has_seen_functions)
        return None if now is None else Reason(*now, self._stage, way_out="call it outside of that")

    def run_eagerly(self, reason: Reason, eagerly: Callable[[], Any]) -> Any:
        """The result of `eagerly`, noted; in strict mode an error. Under ``force_eager`` nothing is noted.

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
        """Keep `variant`."""
        variant.used = next(self._clock)
        kept = {**self._variants, key: [*self._variants.get(key, ()), variant]}
        if sum(map(len, kept.values())) > self._config.cache_size:
            oldest = min(itertools.chain(*kept.values()), key=lambda one: one.used)
            kept = {k: [one for one in ones if one is not oldest] for k, ones in kept.items()}
        self._variants = {k: ones for k, ones in kept.items() if ones}

    def clear(self) -> None:
        """Forget all of them."""
        self._variants = {}

    def _found(self, key: Hashable, leaves: Sequence[Any]) -> Variant | None:
        for variant in self._variants.get(key, ()):
            if variant.guard is None or variant.guard.fits(leaves):
                variant.used = next(self._clock)
                return variant
        return None

    def _made(self, key: Hashable, leaves: Sequence[Any]) -> tuple[Variant, Callable[[], Any] | None]:
        """A new variant, unless another thread has made it meanwhile; what this call does, if it ran."""
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
        """Code has raised. If eager raises too, that is the program's error; if not, the code is at fault."""
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
