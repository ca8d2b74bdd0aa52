"""Logs and traces what the live path does with one backward.

In: the report of a captured backward, and what happens to it. Out: entries of that report, records in the
loggers below ``retrograd.live``, artifacts and spans in torch's structured trace under one compile id, and
profiler ranges. A text is built only if a log or trace is on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import fx

from retrograd.errors import Reason
from retrograd.events import LOGS, live_log
from retrograd.graph.backward_graph import (
    Accumulation,
    CallKind,
    NodeCall,
    OpaqueCall,
    Segment,
    call_of,
    readable,
    readable_schedule,
)
from retrograd.process import cached_property
from retrograd.progress import watched, working
from retrograd.report import BackwardReport, LoweringReport
from retrograd.report_text import counted
from retrograd.runtime.profiler import (
    CompileId,
    artifact,
    compiling,
    event,
    new_compile_id,
    node_range,
    text_range,
)
from retrograd.trace import recorded

#: The format in which `forward_line` writes a line of the user's code.
_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)  (?P<code>.*)")

_HAS_RANGE = {CallKind.NODE, CallKind.CPP_FUNCTION, CallKind.FUNCTION, CallKind.ACCUMULATE}


class PlanLog:
    """Logs and traces one backward."""

    def __init__(self, report: BackwardReport) -> None:
        self._report = report

    @cached_property
    def compile_id(self) -> CompileId:
        """The id under which torch's structured trace files this backward."""
        return new_compile_id()

    # logs and artifacts

    def laid_out(self, code: Callable[[], str]) -> None:
        """The plan has been made; `code` gives its generated function as text."""
        graph, schedule = self._report.graph, self._report.schedule
        self._tell("graph", "retrograd_backward_graph", lambda: readable(graph))
        self._tell("schedule", "retrograd_hook_schedule", lambda: readable_schedule(graph, schedule))
        artifact("retrograd_plan", code, self.compile_id)

    def lowered(self, lowering: LoweringReport) -> None:
        """A segment was compiled, or its compilation was given up."""
        self._report.lowerings.append(lowering)
        segment, name = f"segment {lowering.segment}", f"retrograd_segment_{lowering.segment}"
        if lowering.graph is not None:
            artifact(f"{name}_graph", lowering.code, self.compile_id)
            self._tell("guards", f"{name}_guards", lambda: f"{segment}: {lowering.guards}")
        if lowering.recompile:
            text = f"{segment} is lowered again: {lowering.because}"
            self._tell("recompiles", f"{name}_recompile_reason", lambda: text, logging.INFO)
        elif lowering.is_interpreted:
            text = f"{segment} is interpreted: {lowering.because}"
            self._tell("recompiles", f"{name}_interpreted", lambda: text, logging.INFO)

    def recorded(self, reason: Reason) -> None:
        """Something runs differently from what the user asked for."""
        if reason not in self._report.notes:
            self._report.notes.append(reason)
            live_log.info("backward %s: %s", self.compile_id, reason)

    def _tell(self, log: str, name: str, text: Callable[[], str], level: int = logging.DEBUG) -> None:
        if LOGS[log].isEnabledFor(level):
            LOGS[log].log(level, "backward %s\n%s", self.compile_id, text())
        artifact(name, text, self.compile_id)

    # spans

    def first_run(self) -> AbstractContextManager[None]:
        """Use this around a run that compiles segments: if it takes long, it says how many are compiled."""
        nodes = counted(len(self._report.graph.node_calls), "node")
        total = counted(len(self._report.schedule.segments), "segment")

        def done() -> str:
            return f"{len({low.segment for low in self._report.lowerings})} of {total} done"

        return watched(f"the first run of a backward of {nodes}", done)

    def lowering(self, segment: int) -> AbstractContextManager[Callable[[], float]]:
        """Use this around the lowering of a segment. Gives a function that returns the seconds since then."""
        return working(f"compiling segment {segment}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Use this around a stage of lowering: torch then files its records under this backward."""
        with compiling(self.compile_id), event(f"retrograd.{name}", self.compile_id):
            yield

    def node_recorded(self, node: fx.Node) -> AbstractContextManager[None]:
        """Use this around the tracing of `node`: its ATen nodes then name its autograd node and source
        line."""
        name = self._report.graph.node_name(call_of(node).node_call)
        note: dict[str, Any] = {"custom": {"autograd_node": name}}
        if found := _LINE.fullmatch(_node_call(self._report, node).source):
            place = f'  File "{found["file"]}", line {found["line"]}, in forward'
            note["stack_trace"] = f"{place}\n    {found['code']}\n"
        return recorded(**note)

    # profiler ranges

    def node_ranges(self, node: fx.Node) -> AbstractContextManager[None]:
        """Use this around one call of an interpreted segment: eager's ranges, if the call is a node."""
        if call_of(node).kind not in _HAS_RANGE:
            return nullcontext()
        return node_range(_node_call(self._report, node).name)

    def step_range(self, step: OpaqueCall | Accumulation) -> AbstractContextManager[None]:
        """Use this around an opaque call or an accumulation: eager's ranges for a node, else a
        description."""
        name = _node_call(self._report, step.node).name
        if isinstance(step, Accumulation) or call_of(step.node).kind in _HAS_RANGE:
            return node_range(name)
        return text_range(f"{step.reason} of {name}")

    def segment_range(self, segment: Segment, number: int) -> AbstractContextManager[None]:
        """Use this around a compiled segment: one range with the names of its nodes."""
        names = [
            _node_call(self._report, node).name for node in segment.nodes if call_of(node).kind in _HAS_RANGE
        ]
        shown = ", ".join(names[:8]) + (f", … ({len(names)} nodes)" if len(names) > 8 else "")
        return text_range(f"retrograd segment {number}: {shown}")


def _node_call(report: BackwardReport, node: fx.Node) -> NodeCall:
    return report.graph.node_calls[call_of(node).node_call]
