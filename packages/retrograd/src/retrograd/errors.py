"""The failures that this package reports: one class for each, which writes its own message.

In: what was found, where, and the way out. Out: exceptions and warnings whose text says all three.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Reason:
    """Why something was not captured or not compiled.

    Attributes:
        code: a stable kebab-case key; one warning is given per code and text.
        text: what was found, in one sentence.
        stage: the stage that found it, for example ``live.capture``.
        node: the autograd node concerned, for example ``MulBackward0 (7 of 31)``; empty if none.
        source: the user's source line if torch knows it; otherwise empty.
        way_out: what the user can do about it.
    """

    code: str
    text: str
    stage: str
    node: str = ""
    source: str = ""
    way_out: str = ""

    @property
    def asks_nothing(self) -> bool:
        """Whether the way out is to do nothing."""
        return self.way_out.startswith("nothing to do")

    def __str__(self) -> str:
        where = f"  stage  {self.stage}" + (f"        node  {self.node}" if self.node else "")
        lines = [self.text, f"  code   {self.code}", where]
        if self.source:
            lines.append(f"  from   {self.source}")
        if self.way_out:
            lines.append(f"  try    {self.way_out}")
        return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """The first line of the text of `error`, prefixed by its class name unless it is a `Refusal`."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, Refusal) else f"{type(error).__name__}: {text}"


def name_of(called: Any) -> str:
    """The name of a function, module or other callable, for reports and errors."""
    name: str = getattr(called, "__name__", type(called).__name__)
    return name


class Refusal(Exception):
    """Something cannot be captured, traced, inlined or recorded. The code that catches it makes a
    `Reason`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def not_representable(text: str) -> Refusal:
    """The refusal of something that no graph can represent."""
    return Refusal("not-representable", text)


class CodeFailedError(Exception):
    """Compiled code raised before it changed anything; the cause is the original error."""


class NotReadyError(Exception):
    """There is no code yet, or none for these inputs, so the call runs eagerly."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Escape(Exception):
    """Carries a value out of torch's code."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class RetrogradError(RuntimeError):
    """Base of all errors raised by retrograd itself (never of errors raised by user code)."""


class _ReasonedError(RetrogradError):
    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason

    @classmethod
    def because(cls, code: str, text: str, stage: str, node: str = "", way_out: str = "") -> Self:
        """The error with a `Reason` of these fields."""
        return cls(Reason(code, text, stage, node, way_out=way_out))


class CaptureError(_ReasonedError):
    """A backward could not be captured. Raised only in strict mode; otherwise that backward runs on the stock
    engine."""


class CallError(_ReasonedError):
    """A compiled joint graph was called with inputs that differ from those of its capture."""


class UnlikeTracedError(_ReasonedError):
    """An operator returned a shape or type that torch's fake operator did not predict, so the code is wrong.
    Raised only in strict mode; otherwise such a function runs eagerly."""


class LoweringError(_ReasonedError):
    """A segment could not be traced or compiled. Raised only in strict mode; otherwise the segment is
    interpreted node by node."""


class NoCompilerError(_ReasonedError):
    """A backend found no compiler for the code that it generates. Raised only in strict mode; otherwise the
    graph runs eagerly."""


class VerificationError(_ReasonedError):
    """An artifact violated its invariant between two stages: a bug in retrograd or in a pass given to it."""


class ExportError(_ReasonedError):
    """A joint graph contains something that cannot be written to a file."""


class LoadError(_ReasonedError):
    """A file contains no joint graph, is damaged, or does not match the installed releases."""


class MissingFileError(LoadError, OSError):
    """There is no file to load, or it cannot be opened."""


class PassError(_ReasonedError):
    """A pass raised, or was asked to do something that it cannot do."""


class BackendError(RetrogradError):
    """A backend or a partitioner returned something unusable."""


class InputsChangedError(BackendError):
    """A backend's code changed its inputs. It is always raised, because eager cannot run in its place."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown `name`: the nearest known one, if one is near."""
    return "".join(f"; did you mean {one!r}?" for one in difflib.get_close_matches(name, list(known), n=1))


class OptionError(RetrogradError, ValueError, TypeError):
    """An option or argument does not exist, or has a value that is not allowed.

    Args:
        name: of the option.
        found: what is wrong with it.
        expected: the allowed values, in words.
    """

    def __init__(self, name: str, found: str, expected: str) -> None:
        super().__init__(f"option {name!r}: {found}\n  expected  {expected}")
        self.name = name

    @classmethod
    def unknown(cls, name: str, known: Iterable[str], expected: str = "") -> Self:
        """The error for an option that is not in `known`. Without `expected`, it lists the known options."""
        found = f"there is no such option{nearest(name, known := list(known))}"
        return cls(name, found, expected or f"one of {', '.join(known)}")


class UnsupportedTorchError(RetrogradError):
    """The installed torch does not offer the private protocol that retrograd needs."""

    def __init__(self, version: str, missing: Sequence[str]) -> None:
        found = f"torch {version} is not supported by retrograd\n  missing  {', '.join(missing)}"
        super().__init__(f"{found}\n  try      another release of torch, or a newer one of retrograd")


class ContextError(RetrogradError):
    """A context was left on a thread or task that had not entered it."""

    def __init__(self) -> None:
        super().__init__(
            "compiled_autograd: the context is left on another thread or task than it was entered on, or "
            "more often than it was entered\n"
            "  try    enter and leave it in one place, or use retrograd.enable() for all threads"
        )


class FallbackWarning(UserWarning):
    """Something ran eagerly instead of compiled. Given once per reason."""
