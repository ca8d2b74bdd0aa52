"""Code of a half, recorded as a CUDA graph where that is safe.

In: compiled code and the graph that it was compiled from. Out: code. Why something is not recorded stands in
``retrograd.explain()``; there is a warning where it never will be.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from retrograd.backends.base import Boxed
from retrograd.cudagraphs.graphed_call import graphed
from retrograd.cudagraphs.refusals import is_passing
from retrograd.errors import Reason
from retrograd.report import process_report


def recorded(code: Boxed, graph: fx.Graph, *, kept: Collection[int] = (), loose: Sequence[int] = ()) -> Boxed:
    """`code`, replayed where that is safe; the other arguments are those of `graphed`."""
    return graphed(code, graph, kept=kept, loose=loose, tell=_tell)


def _tell(reason: Reason) -> None:
    process_report.noted(reason, warn=not is_passing(reason))
