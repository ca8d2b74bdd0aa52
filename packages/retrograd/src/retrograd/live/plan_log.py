"""Telling what happens to one captured backward: in its report, the logs and torch's structured trace.

In: what the stages did. Out: entries of its `BackwardReport`; records below ``retrograd.live``; artifacts and
events under a compile id of its own. A text is made only if somebody listens.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import fx

from retrograd._torch.log import CompileId, artifact, compiling, event, new_compile_id, node_range, text_range
from retrograd._torch.trace import noted
from retrograd.errors import Reason
from retrograd.events import LOGS, live_log
from retrograd.graph.backward_graph import Accumulation, CallKind, NodeCall, OpaqueCall, Segment, call_of
from retrograd.graph.render import readable, readable_schedule
from retrograd.report import BackwardReport, LoweringReport

#: how ``_torch.live_graph.forward_line`` writes a line of the user's.
_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)  (?P<code>.*)")

_HAS_RANGE = {CallKind.NODE, CallKind.CPP_FUNCTION, CallKind.FUNCTION, CallKind.ACCUMULATE}


class PlanLog:
    """Tells about one backward."""

    def __init__(self, report: BackwardReport) -> None:
        self._report = report

    @functools.cached_property
    def compile_id(self) -> CompileId:
        """The id under which torch's structured trace files this backward."""
        return new_compile_id()

    # logs and artifacts

    def laid_out(self) -> None:
        """The plan is made."""
        graph, schedule = self._report.graph, self._report.schedule
        _tell(self.compile_id, "graph", "retrograd_backward_graph", lambda: readable(graph))
        _tell(
            self.compile_id, "schedule", "retrograd_hook_schedule", lambda: readable_schedule(graph, schedule)
        )

    def lowered(self, lowering: LoweringReport) -> None:
        """A segment was compiled, or given up."""
        self._report.lowerings.append(lowering)
        segment, name = f"segment {lowering.segment}", f"retrograd_segment_{lowering.segment}"
        if lowering.graph is not None:
            artifact(f"{name}_graph", lowering.code, self.compile_id)
            _tell(self.compile_id, "guards", f"{name}_guards", lambda: f"{segment}: {lowering.guards}")
        if lowering.recompile:
            text = f"{segment} is lowered again: {lowering.because}"
            _tell(self.compile_id, "recompiles", f"{name}_recompile_reason", lambda: text, logging.INFO)
        elif lowering.graph is None:
            text = f"{segment} is interpreted: {lowering.because}"
            _tell(self.compile_id, "recompiles", f"{name}_interpreted", lambda: text, logging.INFO)

    def noted(self, reason: Reason) -> None:
        """Something runs otherwise than asked."""
        if reason not in self._report.notes:
            self._report.notes.append(reason)
            live_log.info("backward %s: %s", self.compile_id, reason)

    # spans

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Around a stage of lowering; what torch records inside is filed under this backward."""
        with compiling(self.compile_id), event(f"retrograd.{name}", self.compile_id):
            yield

    def node_noted(self, node: fx.Node) -> AbstractContextManager[None]:
        """Around the tracing of `node`: its ATen nodes are to name its autograd node and source line."""
        name = self._report.graph.node_name(call_of(node).node_call)
        note: dict[str, Any] = {"custom": {"autograd_node": name}}
        if found := _LINE.fullmatch(_node_call(self._report, node).source):
            place = f'  File "{found["file"]}", line {found["line"]}, in forward'
            note["stack_trace"] = f"{place}\n    {found['code']}\n"
        return noted(**note)

    # profiler ranges

    def node_ranges(self, node: fx.Node) -> AbstractContextManager[None]:
        """Around one call of an interpreted segment: eager's ranges, for the calls that are nodes."""
        if call_of(node).kind not in _HAS_RANGE:
            return nullcontext()
        return node_range(_node_call(self._report, node).name)

    def step_range(self, step: OpaqueCall | Accumulation) -> AbstractContextManager[None]:
        """Around an opaque call or an accumulation: eager's ranges for a node, else what it is."""
        name = _node_call(self._report, step.node).name
        if isinstance(step, Accumulation) or call_of(step.node).kind in _HAS_RANGE:
            return node_range(name)
        return text_range(f"{step.reason} of {name}")

    def segment_range(self, segment: Segment, number: int) -> AbstractContextManager[None]:
        """Around a compiled segment: the names of its nodes."""
        names = [
            _node_call(self._report, node).name for node in segment.nodes if call_of(node).kind in _HAS_RANGE
        ]
        shown = ", ".join(names[:8]) + (f", … ({len(names)} nodes)" if len(names) > 8 else "")
        return text_range(f"retrograd segment {number}: {shown}")


def _node_call(report: BackwardReport, node: fx.Node) -> NodeCall:
    return report.graph.node_calls[call_of(node).node_call]


def _tell(
    compile_id: CompileId, log: str, name: str, text: Callable[[], str], level: int = logging.DEBUG
) -> None:
    if LOGS[log].isEnabledFor(level):
        LOGS[log].log(level, "backward %s\n%s", compile_id, text())
    artifact(name, text, compile_id)
