"""One backward, from the gateway to its gradients: decide, collect, plan, run, or fall back with a reason.

In: the arguments of torch's gateway, and the `Session` of the context that is active on this thread.
Out: what torch's engine would return.
"""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from typing import Any

import torch

from retrograd._torch.collect import Collected, EngineBusyError, collect, window
from retrograd._torch.engine import EngineRequest, run_stock
from retrograd._torch.graph_task import run_in_graph_task
from retrograd._torch.obstacles import why_not_collectable
from retrograd._torch.protocol import EngineProtocol
from retrograd._torch.queries import answering
from retrograd.config import Config
from retrograd.errors import CaptureError, FallbackWarning, Reason
from retrograd.events import counters, live_log
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.graph.report import Report
from retrograd.live.capture import BackwardRecorder
from retrograd.live.captured import CapturedBackward
from retrograd.live.plan import Plan
from retrograd.live.running import RunningBackward
from retrograd.live.unreached import raise_as_eager

__all__ = ["Session", "active", "run_backward"]

#: the sessions of this thread's contexts, innermost last.
active: ContextVar[tuple[Session, ...]] = ContextVar("retrograd_sessions", default=())

Grads = tuple[torch.Tensor | None, ...]

_warned: set[tuple[str, str]] = set()


def run_backward(*args: Any, **kwargs: Any) -> Grads:
    """Stands in for ``torch.autograd.graph._engine_run_backward``."""
    sessions = active.get()
    request = EngineRequest.of(*args, **kwargs)
    if not sessions:
        with window.stock():
            return run_stock(request)
    return sessions[-1].run(request)


class Session:
    """What one context does with the backwards that run inside it.

    Args:
        config: its settings.
        reports: are told everything (the context's own report, and that of the process).
    """

    def __init__(self, config: Config, reports: tuple[Report, ...]) -> None:
        self.config = config
        self._reports = reports

    def run(self, request: EngineRequest) -> Grads:
        """Run one backward."""
        if obstacle := why_not_collectable(request):
            return self._fall_back(request, _reason(*obstacle))
        ran: list[Grads] = []
        started = False

        def start(call: Collected) -> None:
            nonlocal started
            started = True
            ran.append(self._run_collected(call, request))

        try:
            collected = collect(request, lambda: self._protocol(request), start)
        except Exception as error:
            if started:
                raise
            return self._fall_back(request, _reason_of(error), error)
        if collected is not None:
            start(collected)
        return ran[0]

    # capture

    def _protocol(self, request: EngineRequest) -> EngineProtocol:
        def finished(backward: BackwardGraph) -> CapturedBackward:
            captured = CapturedBackward(backward, request)
            # Laid out now, while a failure can still go to the stock engine.
            self._plan(captured, request)
            return captured

        return EngineProtocol(BackwardRecorder(finished))

    def _plan(self, captured: CapturedBackward, request: EngineRequest) -> Plan:
        plan, is_new = captured.plan(self.config, request)
        if is_new:
            for report in self._reports:
                report.backwards.append(plan.report)
            live_log.info("%s", plan.report)
        return plan

    # run

    def _run_collected(self, call: Collected, request: EngineRequest) -> Grads:
        # Falling back is still possible as long as the graph is kept, which create_graph implies here (see
        # `why_not_collectable`).
        if request.create_graph and call.artifact.has_unpack_hooks:
            return self._fall_back(request, _reason("create-graph-through-unpack-hooks", _NO_HISTORY))
        if request.keep_graph and call.artifact.has_cpp_functions:
            return self._fall_back(request, _reason("cpp-function-kept", _NO_STATE))
        return self._checked(request, self._run_plan(call, request))

    def _run_plan(self, call: Collected, request: EngineRequest) -> Grads:
        plan = self._plan(call.artifact, request)
        running = RunningBackward(request)
        results: list[Grads] = []

        def body() -> None:
            with answering(running):
                results.append(tuple(plan.run(call, running)))

        if plan.runs_user_code:
            run_in_graph_task(body, request)
        else:
            with torch.set_grad_enabled(request.create_graph):
                body()
        return results[0]

    def _checked(self, request: EngineRequest, grads: Grads) -> Grads:
        """For ``autograd.grad``: the gradients, or eager's error for an input that was not reached."""
        if request.accumulate_grad:
            return ()
        if not request.allow_unreachable:
            for i, grad in enumerate(grads):
                if grad is None:
                    raise_as_eager(i)
        return grads

    # fall back

    def _fall_back(self, request: EngineRequest, reason: Reason, error: Exception | None = None) -> Grads:
        if self.config.strict:
            raise CaptureError(reason) from error
        with window.stock():
            grads = run_stock(request)
        # Only a backward that eager can run is a fallback: an error of the user's is none.
        self._note(reason)
        return grads

    def _note(self, reason: Reason) -> None:
        counters["fallbacks"] += 1
        for report in self._reports:
            report.fallbacks[reason] += 1
        key = (reason.code, reason.text)
        if key not in _warned:
            _warned.add(key)
            live_log.info("fallback: %s", reason)
            warnings.warn(f"a backward ran on the stock engine: {reason}", FallbackWarning, stacklevel=6)


def _reason(code: str, text: str) -> Reason:
    return Reason(
        code, text.split("\n", 1)[0].strip(), "live.capture", way_out=_WAY_OUT.get(code, _WAY_OUT[""])
    )


def _reason_of(error: Exception) -> Reason:
    """Why a capture that raised is not used."""
    if isinstance(error, CaptureError):
        return error.reason
    if isinstance(error, EngineBusyError):
        return _reason("engine-busy", str(error))
    return _reason("capture-failed", f"{type(error).__name__}: {error}")


def forget_warnings() -> None:
    """Give every fallback warning again."""
    _warned.clear()


_NO_HISTORY = "the engine does not tell the history of saved tensors behind unpack hooks"
_NO_STATE = "a C++ function that is not traceable may keep state for the next backward of the retained graph"

_WAY_OUT = {
    "": "strict=True shows where; retrograd.explain() lists all reasons",
    "reentrant": "nothing to do: the outer backward is compiled, the inner one runs as eager runs it",
    "intermediate-input": "retain_graph=True has it compiled",
    "cpp-function-kept": "declare `static constexpr bool is_traceable = true` if it keeps no state",
    "engine-busy": "run the backwards of several threads one after the other to have them compiled",
}
