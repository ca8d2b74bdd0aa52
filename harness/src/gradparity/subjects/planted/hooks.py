"""Faults of hooks: when they are called, how often, with what, and what becomes of their results.

In: a hook. Out: a hook that does one thing wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils.hooks import RemovableHandle

from gradparity.subjects.planted.fault import Fault, Planted, hooked_by

Hook = Callable[..., Any]


class Late(Planted):
    """Hooks run when the backward is over, in the order of their calls or the other way round."""

    def __init__(self, name: str, backwards: bool) -> None:
        super().__init__(name)
        self._backwards = backwards
        self._waiting: list[Callable[[], Any]] | None = None

    def wrap_hook(self, hook: Hook) -> Hook:
        """Puts the call off while a backward runs."""

        def put_off(*args: Any) -> Any:
            if self._waiting is None:
                return hook(*args)
            self._waiting.append(lambda: hook(*args))
            return None

        return put_off

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Makes the calls at the end."""
        self._waiting = []
        try:
            yield
        finally:
            waiting, self._waiting = self._waiting, None
            for call in reversed(waiting) if self._backwards else waiting:
                call()


def _twice(hook: Hook) -> Hook:
    def called(*args: Any) -> Any:
        hook(*args)
        return hook(*args)

    return called


def _every_other(hook: Hook) -> Hook:
    calls = [0]

    def called(*args: Any) -> Any:
        calls[0] += 1
        return hook(*args) if calls[0] % 2 else None

    return called


def _ignored(hook: Hook) -> Hook:
    def called(*args: Any) -> Any:
        hook(*args)

    return called


def _with_first_payload(hook: Hook) -> Hook:
    """Every call is given what the first was given, as a graph is that was recorded once."""
    first: list[tuple[Any, ...]] = []

    def called(*args: Any) -> Any:
        if not first:
            first.append(tuple(arg.clone() if _is_plain(arg) else arg for arg in args))
        return hook(*first[0])

    return called


def _with_zeros(hook: Hook) -> Hook:
    return lambda *args: hook(*(torch.zeros_like(arg) if _is_plain(arg) else arg for arg in args))


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and not (value.is_leaf and value.requires_grad)


def _never_removed() -> AbstractContextManager[Any]:
    """A hook that is removed goes on being called."""
    return mock.patch.object(RemovableHandle, "remove", return_value=None)


def _first_hook_only() -> AbstractContextManager[Any]:
    """Of several hooks of one tensor only the first is kept."""
    before = torch.Tensor.register_hook

    def register(self: torch.Tensor, hook: Hook) -> Any:
        if self._backward_hooks:
            return RemovableHandle(OrderedDict())
        return before(self, hook)

    return mock.patch.object(torch.Tensor, "register_hook", register)


COUNT = ("hook-count",)
PAYLOAD = ("hook-payload-bits", "grad-values-bits", "values-bits")
WHERE = ("hooks", "steps_hooks")

FAULTS = (
    Fault("hooks-last-in-first-out", "hooks run in the opposite order", lambda name: Late(name, True), ("hook-order", *PAYLOAD), WHERE),
    Fault("hooks-late", "hooks run when the backward is over", lambda name: Late(name, False), (*PAYLOAD, "hook-order"), WHERE),
    Fault("hook-twice", "a hook is called twice", hooked_by(_twice), COUNT, WHERE),
    Fault("hook-every-other", "a hook is called every other time", hooked_by(_every_other), COUNT, ("steps_hooks", "hooks")),
    Fault("hook-result-ignored", "what a hook returns is ignored", hooked_by(_ignored), ("grad-values-bits", "values-bits", "hook-payload-bits"), WHERE),
    Fault("hook-stale-payload", "a hook is given what its first call was given", hooked_by(_with_first_payload), PAYLOAD, ("steps_hooks",)),
    Fault("hook-zero-payload", "a hook is given zeros", hooked_by(_with_zeros), PAYLOAD, WHERE),
    Fault("hook-not-removed", "a hook that was removed still runs", lambda name: Planted(name, around=_never_removed), (*COUNT, *PAYLOAD), ("steps_hooks",)),
    Fault("one-hook-each", "of several hooks of a tensor one runs", lambda name: Planted(name, around=_first_hook_only), (*COUNT, *PAYLOAD), WHERE),
)  # fmt: skip
