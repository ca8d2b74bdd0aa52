"""One backward, from the gateway to its gradients: decide, collect, plan, run, or fall back with a reason.

In: an `EngineRequest`, given to the `Session` that it belongs to (see `contexts`). Out: what torch's engine
would return.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from retrograd._torch.autograd import (
    Collected,
    EngineRequest,
    answering,
    beginning_of,
    plans_under_way,
    run_in_graph_task,
    run_stock,
    why_not_collectable,
    window,
)
from retrograd._torch.cuda import in_order_with_streams
from retrograd._torch.log import event
from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.errors import CaptureError, Reason, Refusal, first_line
from retrograd.events import counters, live_log
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.live.capture.retained_graph import collect_and_release
from retrograd.live.capture.unreached import raise_as_eager
from retrograd.live.captured import CapturedBackward
from retrograd.live.inlined.consumed_parts import use_up
from retrograd.live.inlined.request_inlined import with_compiled_functions
from retrograd.live.lower.determinism import operations_may_warn
from retrograd.live.repetition import Repetition
from retrograd.live.run.plan import Plan
from retrograd.live.run.running_backward import RunningBackward
from retrograd.report import Report
from retrograd.specialize.pace import Pace

Grads = tuple[torch.Tensor | None, ...]

#: for so many kinds of backwards a session decides whether they are worth compiling; all others are compiled.
KEPT_PACES = 64


class Session:
    """What one context does with the backwards that run inside it.

    Args:
        config: its settings.
        report: is told everything.
        is_paced: whether small backwards that are slower compiled than eager are to run eagerly.
    """

    def __init__(self, config: Config, report: Report, is_paced: bool = False) -> None:
        self.config, self._report = config, report
        paced = is_paced and not config.strict and find_backend(config.backend).for_speed
        self._paces: dict[Hashable, Pace] | None = {} if paced else None
        self._repetition = Repetition()

    def run(self, asked: EngineRequest) -> Grads:
        """Run one backward."""
        pace = self._pace_of(asked)
        if pace is None:
            return self._run(asked)
        is_compiled = pace.is_worth_compiling()
        if pace.aside is not None:
            return self._fall_back(asked, pace.aside)
        with pace.timed(is_compiled, _compilations):
            return self._run(asked) if is_compiled else self._run_stock(asked)

    def _pace_of(self, asked: EngineRequest) -> Pace | None:
        """What measures backwards like this one; None if nothing does. Before the engine has walked their
        graphs, two are alike that begin alike."""
        if self._paces is None or asked.create_graph or plans_under_way():
            return None
        kind = beginning_of(asked)
        pace = self._paces.get(kind)
        if pace is None and len(self._paces) < KEPT_PACES:
            pace = self._paces[kind] = Pace(f"the backward below {', '.join(kind[0])}", "live.run")
        return pace

    def _run(self, asked: EngineRequest) -> Grads:
        if not self.config.strict and (reason := self._repetition.why_not(asked)):
            return self._fall_back(asked, reason)
        request = with_compiled_functions(asked)
        if obstacle := why_not_collectable(request):
            return self._fall_back(asked, _reason(*obstacle))
        ran: list[Grads] = []
        started = False

        def start(call: Collected) -> None:
            nonlocal started
            started = True
            ran.append(self._run_collected(call, request))

        try:
            with event("retrograd.collect"):
                collected = collect_and_release(request, self._captured, start)
        except Exception as error:
            if started:
                raise
            return self._fall_back(asked, _reason_of(error), error)
        if collected is not None:
            start(collected)
        return ran[0]

    # capture

    def _captured(self, backward: BackwardGraph, request: EngineRequest) -> CapturedBackward:
        captured = CapturedBackward(backward, request)
        # Laid out now, while a failure can still go to the stock engine.
        self._plan(captured, request)
        return captured

    def _plan(self, captured: CapturedBackward, request: EngineRequest) -> Plan:
        plan, is_new = captured.plan(self.config, request)
        if is_new:
            self._report.captured(plan.report)
            live_log.info("%s", plan.report)
            plan.log.laid_out()
        return plan

    # run

    def _run_collected(self, call: Collected, request: EngineRequest) -> Grads:
        # Falling back is still possible as long as the graph is kept, which create_graph implies here (see
        # `why_not_collectable`).
        if request.create_graph and (node := call.artifact.node_without_history(call, request)):
            return self._fall_back(request.as_asked(), replace(_NO_HISTORY, node=node))
        if request.create_graph and call.artifact.has_aot_graphs:
            return self._fall_back(request.as_asked(), _NO_AOT_HISTORY)
        if request.keep_graph and call.artifact.has_cpp_functions:
            return self._fall_back(request.as_asked(), _NO_STATE)
        return self._checked(request.as_asked(), self._run_plan(call, request))

    def _run_plan(self, call: Collected, request: EngineRequest) -> Grads:
        plan = self._plan(call.artifact, request)
        self._repetition.runs(plan)
        running = RunningBackward(request)
        use_up(call.artifact.backward, request, lambda: running.node_calls)
        results: list[Grads] = []

        def body() -> None:
            with answering(running), event("retrograd.run", plan.log.compile_id), in_order_with_streams():
                results.append(tuple(plan.run(call, running)))

        # The engine warns of a backward with create_graph.
        warns = operations_may_warn() or (request.create_graph and request.accumulate_grad)
        if plan.runs_user_code or warns:
            run_in_graph_task(body, request)
        else:
            with torch.set_grad_enabled(request.create_graph):
                body()
        return results[0]

    def _checked(self, request: EngineRequest, grads: Grads) -> Grads:
        """For ``autograd.grad``: the gradients, or eager's error for an input that was not reached."""
        if request.accumulate_grad:
            return ()
        grads = grads[: len(request.inputs)]
        if not request.allow_unreachable:
            for i, grad in enumerate(grads):
                if grad is None:
                    raise_as_eager(i)
        return grads

    # fall back

    def _fall_back(self, request: EngineRequest, reason: Reason, error: Exception | None = None) -> Grads:
        self.refuse(reason, error)
        grads = self._run_stock(request)
        # Only a backward that eager can run is a fallback: an error of the user's is none.
        self.note(reason)
        return grads

    def _run_stock(self, request: EngineRequest) -> Grads:
        with window.stock():
            return run_stock(request)

    def refuse(self, reason: Reason, error: Exception | None = None) -> None:
        """In strict mode, raise."""
        if self.config.strict:
            raise CaptureError(reason) from error

    def leave_to_transform(self) -> None:
        """``torch.func`` differentiates tensors of its own, by a backward that is part of the transform."""
        self._report.noted(_TRANSFORM, warn=False)

    def note(self, reason: Reason) -> None:
        """A backward has run on the stock engine."""
        self._report.fell_back(reason, "a backward ran on the stock engine")


def _compilations() -> int:
    return sum(counters[name] for name in ("captures", "plans", "lowerings", "settled_plans"))


def _reason(code: str, text: str) -> Reason:
    return Reason(
        code, text.split("\n", 1)[0].strip(), "live.capture", way_out=_WAY_OUT.get(code, _WAY_OUT[""])
    )


def _reason_of(error: Exception) -> Reason:
    """Why a capture that raised is not used."""
    if isinstance(error, CaptureError):
        return error.reason
    if isinstance(error, Refusal):
        return _reason(error.code, str(error))
    return _reason("capture-failed", first_line(error))


_WAY_OUT = {
    "": "strict=True shows where; retrograd.explain() lists all reasons",
    "create-graph-through-unpack-hooks": "run that operation outside of saved_tensors_hooks",
    "nested-too-deep": "nothing to do: the outer backwards are compiled, this one runs as eager runs it",
    "nested-in-engine-frame": "register a hook that stores the gradient instead of calling retain_grad()",
    "cpp-function-kept": "declare `static constexpr bool is_traceable = true` if it keeps no state",
    "engine-busy": "run the backwards of several threads one after the other to have them compiled",
}

_TRANSFORM = Reason(
    "transform",
    "torch.func (grad, vjp, jacrev, …) differentiated inside the context: that backward was not captured",
    "live.capture",
    way_out="torch.autograd.grad, or .backward()",
)

_NO_HISTORY = _reason(
    "create-graph-through-unpack-hooks",
    "torch does not tell the history of tensors saved behind unpack hooks",
)

_NO_STATE = _reason(
    "cpp-function-kept",
    "a C++ function that is not traceable may keep state for the next backward of the retained graph",
)

_NO_AOT_HISTORY = _reason(
    "create-graph-through-compiled-forward",
    "create_graph=True through a forward that torch.compile compiled",
)

#: in how many running plans of its thread a backward may be nested. Eager nests 60 deep before it goes on
#: with a fresh stack on another thread; a plan takes 19 of Python's 1000 frames where eager takes 4.
MOST_NESTED = 4

TOO_DEEP = _reason(
    "nested-too-deep", f"a backward nested in more than {MOST_NESTED} others: Python's stack is short"
)
