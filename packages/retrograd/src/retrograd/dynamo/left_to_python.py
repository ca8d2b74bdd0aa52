"""Decides what Python runs of a function that Dynamo compiles, and reports why.

In: frames that Dynamo is about to convert, and conversions that failed. Out: decisions, and entries in a
report.

Nothing is compiled inside forward-mode differentiation, because Dynamo's graph has lost a Function's ``jvp``,
nor while saved-tensor hooks are set, because they see what eager saves.
Under ``backend="eager"`` torch's optimizers are not traced. When Dynamo traces them, they use tensors as step
counts and another order of operations, so the last bits of their results differ from eager's. Optimizers of
wrapper subclasses are never traced: for DTensors, that takes longer than all other code of a step together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import torch
from torch._dynamo.exc import BackendCompilerFailed

from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.errors import CaptureError, Reason
from retrograd.report import Report, compiling_for, reason_of
from retrograd.runtime.modes import (
    FORWARD_MODE,
    SAVED_HOOKS,
    are_saved_hooks_set,
    is_forward_mode,
    way_out_of,
)
from retrograd.runtime.subclass import is_wrapper

#: where torch's optimizers and schedulers are.
_OPTIMIZERS = torch.optim.__path__[0]


def is_left_in_forward_mode(what: str, is_strict: bool, report: Report) -> bool:
    """Whether forward-mode differentiation is active, so that Python runs `what`. The reason goes into
    `report`.

    Raises:
        CaptureError: it is active, and `is_strict` is set.
    """
    if not is_forward_mode():
        return False
    _leave(FORWARD_MODE, what, is_strict, report)
    return True


def _leave(why: tuple[str, str], what: str, is_strict: bool, report: Report) -> None:
    reason = Reason(*why, "dynamo", way_out=way_out_of(why[0]))
    if is_strict:
        raise CaptureError(reason)
    report.fell_back(reason, f"{what} runs eagerly")


class LeftToPython:
    """Decides, for one compiled callable, about the frames that Dynamo meets, and reports on them.

    Args:
        what: the callable, in words.
        config: the settings: the backend, and whether a failure is an error.
        report: receives failures.

    Attributes:
        computes_like_eager: whether results must equal eager's bit for bit.
        report: receives failures.
        found: what is not traced, because its results would differ from eager's.
    """

    def __init__(self, what: str, config: Config, report: Report) -> None:
        self._what, self._is_strict, self.report = what, config.strict, report
        self.computes_like_eager = not find_backend(config.backend).traces
        self.found: set[str] = set()

    def runs_as_it_is(self, frame: FrameType) -> bool:
        """Whether Python runs the frame: inside forward-mode differentiation or saved-tensor hooks, or
        because it is an optimizer that must compute as eager does, or one for wrapper subclasses.

        Raises:
            CaptureError: in forward mode or under saved-tensor hooks, if ``strict``.
        """
        what = f"a part of {self._what}"
        if is_left_in_forward_mode(what, self._is_strict, self.report):
            return True
        if are_saved_hooks_set():  # code would not be used now, and takes long to make
            _leave(SAVED_HOOKS, what, self._is_strict, self.report)
            return True
        if not frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return False
        if not (self.computes_like_eager or _updates_wrappers(frame)):
            return False
        self.found.add("optimizer")
        return True

    @contextmanager
    def compiling(self, code: CodeType) -> Iterator[None]:
        """Inside, Dynamo compiles `code`: what it compiles is reported here, and how long it takes."""
        with self.report.compiling(f"Dynamo compiles {_place(code)}"), compiling_for(self.report):
            yield

    def switched_off(self) -> None:
        """Report that Dynamo is disabled, so that Python runs everything."""
        text = f"{self._what} runs eagerly, because Dynamo is switched off"
        self.report.recorded(
            Reason("dynamo-disabled", text, "dynamo", way_out="TORCHDYNAMO_DISABLE=0"), warn=False
        )

    def failed(self, code: CodeType, error: Exception) -> None:
        """Report code that Dynamo could not convert. Python runs it.

        Raises:
            Exception: the error of the conversion, if ``strict``.
        """
        inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else None
        found = inner if isinstance(inner, Exception) else error
        if self._is_strict:
            raise found
        reason = reason_of(found, _place(code), "not-compiled")
        self.report.fell_back(reason, f"a part of {self._what} runs eagerly")

    def limited(self, code: CodeType) -> None:
        """Report code that Dynamo does not compile again, because it has reached the recompile limit.

        Raises:
            CaptureError: always, if ``strict``.
        """
        reason = Reason(
            "recompile-limit",
            f"{_place(code)} was compiled as often as torch._dynamo.config.recompile_limit allows",
            "dynamo",
            way_out='TORCH_LOGS="recompiles" says why; dynamic=True, a higher limit, or steps on one thread',
        )
        if self._is_strict:
            raise CaptureError(reason)
        self.report.fell_back(reason, f"a part of {self._what} runs eagerly")


def _updates_wrappers(frame: FrameType) -> bool:
    """Whether the frame is a method of an optimizer of wrapper subclasses, or calls one."""
    given = frame.f_locals.get("self"), *frame.f_locals.get("args", ())[:1]
    optimizers = [value for value in given if isinstance(value, torch.optim.Optimizer)]
    # An optimizer has no groups before its base class is initialised.
    groups = [group["params"] for one in optimizers for group in getattr(one, "param_groups", ())]
    return any(is_wrapper(parameter) for group in groups for parameter in group)


def _place(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
