"""Replaces code in parts by code of the whole graph after many calls.

In: code in parts, and two functions: one has another process compile the whole graph, the other returns its
code. Out: a boxed callable like both.

Parts make the first call fast. The whole graph makes later calls fast: kernels are fused across the borders
of parts, and memory is reused that parts would allocate anew. The results of the two may differ in the last
bits. So we switch after a fixed number of calls, and wait for the code if needed: results never depend on how
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
        begin: starts to compile the whole graph. If it raises, the parts stay.
        finish: returns the code of the whole graph. If it raises, the parts stay.
    """

    def __init__(
        self, parts: Boxed, calls: int, begin: Callable[[], object], finish: Callable[[], Boxed]
    ) -> None:
        self._run, self._calls, self._lock = parts, 0, ForkSafeLock()
        #: what to do after calls, last action first: the earliest call, and a function of the call's results.
        self._besides: list[tuple[int, Callable[[Sequence[Any]], object]]] = [
            (calls, lambda results: self._change(finish, results)),
            (max(1, calls // WHOLE_BEGINS), lambda results: begin()),
        ]
        self._due: float = self._besides[-1][0]

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the code."""
        self._calls += 1
        results = self._run(args)
        if self._calls >= self._due and self._lock.take_if_free():
            try:
                self._do_besides(results)
            finally:
                self._lock.release()
        return results

    @torch.compiler.disable  # Dynamo would trace it if a compiled function runs a backward
    def _do_besides(self, results: Sequence[Any]) -> None:
        if self._calls < self._due:
            return
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if is_captured or not are_modes_plain():
            return  # it would be captured or traced; we try after a later call
        try:
            with torch.inference_mode(False):
                self._besides.pop()[1](results)
        except Exception as error:
            self._besides.clear()
            _log.info("parts remain: %s", first_line(error))
        self._due = self._besides[-1][0] if self._besides else math.inf

    def _change(self, finish: Callable[[], Boxed], results: Sequence[Any]) -> None:
        """Run the whole graph from now on. Its results get the strides of `results`, because the code that
        reads them was compiled for these."""
        self._run = with_strides_of(finish(), results)
        counters["whole_graphs"] += 1
