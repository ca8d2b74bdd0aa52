"""A function that is called with several sets of parameters, as the code of a layer that many layers share.

In: a boxed function, and what makes a call of it that records itself. Out: the same function. Each set of
parameters has recordings of its own, which read the parameters where they are and are held at the same time.
They go when a parameter does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

#: sets of parameters that are remembered, the ones met last.
MOST_SETS = 256


class RecordedCall(Protocol):
    """A call that may have found that its function cannot be recorded."""

    is_refused: bool

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """The results; `inputs` is emptied."""


class GraphedFunction:
    """A function, recorded apart for each set of parameters among its inputs.

    Args:
        make: makes the call for one more set.
    """

    def __init__(self, make: Callable[[], RecordedCall]) -> None:
        self._make = make
        self._places: tuple[int, ...] | None = None
        #: by the addresses of the parameters, with what sees one of them go.
        self._calls: dict[tuple[int, ...], tuple[RecordedCall, list[weakref.ref[Any]]]] = {}
        self._refused: RecordedCall | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """The results; `inputs` is emptied."""
        if self._places is None:
            self._places = tuple(i for i, value in enumerate(inputs) if isinstance(value, nn.Parameter))
        where = tuple([inputs[i].data_ptr() for i in self._places])
        known = self._calls.get(where)
        call = self._refused or (known[0] if known else self._new(where, [inputs[i] for i in self._places]))
        results = call(inputs)
        if call.is_refused:
            self._refused = call  # and so will others be
        return results

    def _new(self, where: tuple[int, ...], parameters: Sequence[Any]) -> RecordedCall:
        while len(self._calls) >= MOST_SETS:
            self._calls.pop(next(iter(self._calls)), None)
        calls = weakref.WeakMethod(self._forget)

        def gone(_: object) -> None:
            if (forget := calls()) is not None:
                forget(where)

        watches = [weakref.ref(one, gone) for one in parameters]
        return self._calls.setdefault(where, (self._make(), watches))[0]

    def _forget(self, where: tuple[int, ...]) -> None:
        self._calls.pop(where, None)
