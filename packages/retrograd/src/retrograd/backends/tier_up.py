"""After many calls, code of a whole graph in place of code in parts.

In: code in parts, and functions that have another process begin with the whole, and that give its code.
Out: a boxed callable like both.

Parts make the first call quick. The whole makes later ones quick: its kernels are fused across the borders
of parts, and it uses memory again that parts ask for anew. The results of the two may differ in last bits. So
the change comes after a fixed number of calls, and waits for the code if need be: no result depends on how
long compiling took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograd.errors import first_line
from retrograd.events import AOT_LOGS, counters
from retrograd.graph.emit import Boxed
from retrograd.graph.fx import with_strides_of
from retrograd.policy import WHOLE_BEGINS
from retrograd.process import ForkSafeLock
from retrograd.runtime.modes import are_modes_plain

_log = AOT_LOGS["recompiles"]


class TierUp:
    """Code in parts, until it is replaced.

    Args:
        parts: the code.
        calls: how many calls it serves, at least 2.
        begin, finish: have the code of the whole made, and give it. Parts remain where one of them raises.
    """

    def __init__(
        self, parts: Boxed, calls: int, begin: Callable[[], object], finish: Callable[[], Boxed]
    ) -> None:
        self._run, self._calls, self._lock = parts, 0, ForkSafeLock()
        #: what follows a call, the last one first: its number at the earliest, and a function of its results.
        self._besides: list[tuple[int, Callable[[Sequence[Any]], object]]] = [
            (calls, lambda results: self._change(finish, results)),
            (max(1, calls // WHOLE_BEGINS), lambda results: begin()),
        ]
        self._due: float = self._besides[-1][0]

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run it."""
        self._calls += 1
        results = self._run(args)
        if self._calls >= self._due and self._lock.take_if_free():
            try:
                self._do_besides(results)
            finally:
                self._lock.release()
        return results

    @torch.compiler.disable  # Dynamo would trace it, where a compiled function runs a backward
    def _do_besides(self, results: Sequence[Any]) -> None:
        if self._calls < self._due:
            return
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if is_captured or not are_modes_plain():
            return  # it would be seen, so it follows a later call
        try:
            with torch.inference_mode(False):
                self._besides.pop()[1](results)
        except Exception as error:
            self._besides.clear()
            _log.info("parts remain: %s", first_line(error))
        self._due = self._besides[-1][0] if self._besides else math.inf

    def _change(self, finish: Callable[[], Boxed], results: Sequence[Any]) -> None:
        """Have the whole run from now on. Its results are laid out as `results` are: code that reads them was
        compiled for that."""
        self._run = with_strides_of(finish(), results)
        counters["whole_graphs"] += 1
