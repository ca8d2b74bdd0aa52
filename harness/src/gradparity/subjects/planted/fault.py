"""Fault: what is planted, and who must find it.

In: a name, a sentence, a way to make the subject. Out: frozen values, and the base of the subjects.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from gradparity.outcome import Outcome
from gradparity.subjects.base import Subject

T = TypeVar("T")
Context = Callable[[], AbstractContextManager[Any]]
Wrap = Callable[[Any], Any]


class Planted(Subject):
    """Eager, but for what is given: a change of the outcome after the run, a wrapper of what is compiled, of
    hooks, a context around the backward or around everything.
    """

    bitwise = True
    accountable = True

    def __init__(
        self,
        name: str,
        change: Callable[[Outcome], Outcome] | None = None,
        wrap: Wrap | None = None,
        hook: Wrap | None = None,
        backward: Context = nullcontext,
        around: Context = nullcontext,
    ) -> None:
        super().__init__(name)
        self._change, self._wrap, self._hook = change, wrap, hook
        self._backward, self._around = backward, around

    def compile(self, target: T) -> T:
        """The target, wrapped if that is the fault."""
        made: T = self._wrap(target) if self._wrap is not None else target
        return made

    def wrap_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, wrapped if that is the fault."""
        wrapped: Callable[..., Any] = self._hook(hook) if self._hook is not None else hook
        return wrapped

    def backward(self) -> AbstractContextManager[Any]:
        """The context of the fault, if it has one."""
        return self._backward()

    def around(self) -> AbstractContextManager[Any]:
        """The context of the fault, if it has one."""
        return self._around()

    def observed(self, outcome: Outcome) -> Outcome:
        """The outcome, changed if that is the fault."""
        return self._change(outcome) if self._change is not None else outcome


@dataclass(frozen=True)
class Fault:
    """One fault. `symptoms`: what the oracle that should find it says, one of these; `policies`: those whose
    programs find it, in the order in which to look (none: no generated program can); `check`: the check that
    finds it where no oracle can; `scenario`: the one that finds it where no generated program can.
    """

    name: str
    doc: str
    make: Callable[[str], Subject]
    symptoms: tuple[str, ...]
    policies: tuple[str, ...] = ()
    check: str = ""
    scenario: str = ""


def compiled_by(wrap: Wrap) -> Callable[[str], Subject]:
    """Subjects that compile by this wrapper."""
    return lambda name: Planted(name, wrap=wrap)


def within(backward: Context) -> Callable[[str], Subject]:
    """Subjects with this context around the backward."""
    return lambda name: Planted(name, backward=backward)


def hooked_by(hook: Wrap) -> Callable[[str], Subject]:
    """Subjects that wrap hooks by this."""
    return lambda name: Planted(name, hook=hook)
