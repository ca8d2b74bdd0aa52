"""Runs one backward: collect and plan it and run the plan, or fall back to the stock engine with a reason.

In: an `EngineRequest`. `contexts` says which `Session` it belongs to. Out: what torch's engine would return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.engine import (
    DDP,
    Collected,
    EngineRequest,
    LiveBackward,
    answering,
    beginning_of,
    is_mostly_compiled,
    is_small,
    names_of_nodes,
    plans_under_way,
    replace_cpp_hooks,
    run_in_graph_task,
    run_stock,
    streams_of,
    why_not_collectable,
)
from retrograd.errors import CaptureError, Reason, Refusal, first_line
from retrograd.events import counters, live_log
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.graph.structure import first_difference
from retrograd.live.capture.retained_graph import ask_for_compiled_functions, collect_and_run, use_up
from retrograd.live.captured import CapturedBackward
from retrograd.live.lower.lowerer import INTERPRETED_PART
from retrograd.live.run.plan import Plan
from retrograd.process import Recent, restored_on_error
from retrograd.report import BackwardReport, Report, tell, told_to
from retrograd.runtime.profiler import event
from retrograd.runtime.streams import in_order_with_streams
from retrograd.specialize.profitability import Pace

Grads = tuple[torch.Tensor | None, ...]
_Paces = dict[Hashable, Pace]

#: profitability measurements, by configuration and place in the program
_paces = Recent[_Paces](64)
#: We measure whether compiling pays for this many kinds of backwards. Further kinds are always compiled.
KEPT_PACES = 64

#: Give up capturing after this many new structures. This many backwards of a known structure cancel one new
#: one.
MOST_NEW, PAYS_BACK = 12, 8

#: After giving up, inspect the graph of one backward in this many at first, and remember this many graphs.
LOOKS, LOOKS_KEPT = 16, 32


_NOTHING = nullcontext()


class Session:
    """What one context does with the backwards that run inside it.

    Args:
        config: its settings.
        report: receives everything that happens.
        is_paced: whether small backwards run eagerly if they are slower compiled than eager.
        place: the place in the program. Sessions that are made there share their measurements: each step may
            make a new one.
    """

    def __init__(
        self, config: Config, report: Report, is_paced: bool = False, place: Hashable = None
    ) -> None:
        self.config, self._report = config, report
        backend = find_backend(config.backend)
        backend.prepare()
        paced = is_paced and not config.strict and backend.for_speed
        self._paces: _Paces | None = None
        if paced:
            self._paces = {} if place is None else _paces.get((config, place), dict)[0]
        self._repetition = _Repetition()
        #: the report's entry for each plan
        self._entries: WeakKeyDictionary[Plan, BackwardReport] = WeakKeyDictionary()

    def run(self, asked: EngineRequest) -> Grads:
        """Run one backward."""
        if asked.create_graph:
            self._report.recorded(_DIFFERENTIABLE, warn=False)
            return run_stock(asked)
        if plans_under_way() and not self.config.strict and is_small(asked):
            self._report.recorded(_SMALL_NESTED, warn=False)
            return run_stock(asked)
        pace = self._pace_of(asked)
        if pace is None:
            return self._run(asked)
        is_compiled = pace.is_worth_compiling()
        if pace.disabled is _COMPILED_ALREADY:
            self._report.recorded(_COMPILED_ALREADY, warn=False)
            return run_stock(asked)
        if pace.disabled is not None:
            return self._fall_back(asked, pace.disabled)
        if not is_compiled:
            self._report.recorded(_MEASURED, warn=False)
        with pace.timed(is_compiled, _compilations):
            return self._run(asked) if is_compiled else run_stock(asked)

    def _pace_of(self, asked: EngineRequest) -> Pace | None:
        """The profitability measurement for backwards like this one, or None if there is none. The engine has
        not walked their graphs yet, so two backwards count as alike if their roots look alike."""
        if self._paces is None or plans_under_way():
            return None
        names = beginning_of(asked)
        pace = self._paces.get(names)
        if pace is None and len(self._paces) < KEPT_PACES:
            pace = self._paces[names] = Pace(f"the backward below {', '.join(names[0])}", "live.run")
            if is_mostly_compiled(asked):
                pace.disabled = _COMPILED_ALREADY
        return pace

    def _run(self, asked: EngineRequest) -> Grads:
        if not self.config.strict and (reason := self._repetition.why_not(asked)):
            return self._fall_back(asked, reason)
        if obstacle := why_not_collectable(asked):
            return self._fall_back(asked, _reason(*obstacle))
        backward = LiveBackward(asked)
        if asked.inputs:
            ask_for_compiled_functions(backward)
        ran: list[Grads] = []
        started = False

        def finished(graph: BackwardGraph, backward: LiveBackward) -> CapturedBackward:
            counters["captures"] += 1
            captured = CapturedBackward(graph, backward)
            # Plan now, while a failure can still fall back to the stock engine.
            self._plan(captured, backward)
            return captured

        def start(call: Collected) -> None:
            nonlocal started
            started = True
            ran.append(self._run_collected(call, backward))

        try:
            restored_on_error(collect_and_run, backward, finished, start)
        except Exception as error:
            if started:
                raise
            if replace_cpp_hooks(backward, error):
                return self._run(asked)
            return self._fall_back(asked, _reason_of(error), error)
        return ran[0]

    def _plan(
        self, captured: CapturedBackward, backward: LiveBackward, inputs: Sequence[torch.Tensor] = ()
    ) -> Plan:
        plan, is_new = captured.plan(self.config, backward, inputs)
        if plan not in self._entries:
            self._entries[plan] = self._report.captured(plan.report)
        if is_new:
            live_log.info("%s", plan.report)
            plan.log.laid_out(plan.code)
        return plan

    def _note_run(self, plan: Plan) -> None:
        """Record that this session is about to run a plan."""
        entry = self._entries[plan]
        if entry is plan.report:
            return
        if not entry.runs:
            for reason in plan.given_up():  # they gave up in an earlier context
                tell(reason, INTERPRETED_PART)
        entry.runs += 1

    def _run_collected(self, call: Collected, backward: LiveBackward) -> Grads:
        captured, request = call.artifact, backward.request
        # the graph is retained, so the stock engine still can
        if request.keep_graph and captured.has_cpp_functions:
            return self._fall_back(backward.asked, _NO_STATE)
        plan = self._plan(captured, backward, call.inputs)
        self._repetition.runs(plan)
        use_up(captured.graph, backward)
        if plan.runs_user_code:
            backward.hold_edges()
        results: list[Grads] = []

        def body() -> None:
            streams = streams_of(request)
            in_order = in_order_with_streams(streams) if streams else _NOTHING
            first = _NOTHING if plan.report.runs else plan.log.first_run()
            self._note_run(plan)
            with event("retrograd.run", plan.log.compile_id), in_order, first:
                results.append(tuple(answering(backward, plan.run, call, backward)))

        # Torch passes a warning to Python only inside a backward of its own. In deterministic mode 1,
        # operations that are not deterministic warn.
        with told_to(self._report):
            if plan.runs_user_code or torch.get_deterministic_debug_mode() == 1:
                run_in_graph_task(body, request)
            else:
                with torch.no_grad():
                    body()
        return _checked(backward.asked, results[0])

    # fall back

    def _fall_back(self, request: EngineRequest, reason: Reason, error: Exception | None = None) -> Grads:
        self.refuse(reason, error)
        grads = run_stock(request)
        # Count a fallback only if eager can run the backward: an error of the user's is not one.
        self.note(reason)
        return grads

    def refuse(self, reason: Reason, error: Exception | None = None) -> None:
        """Reject a fallback in strict mode.

        Raises:
            CaptureError: in strict mode.
        """
        if self.config.strict:
            raise CaptureError(
                replace(reason, way_out=_LENIENT) if reason.asks_nothing else reason
            ) from error

    def leave_to_transform(self) -> None:
        """Report that ``torch.func`` runs this backward itself: its tensors are differentiated as part of the
        transform."""
        self._report.recorded(_TRANSFORM, warn=False)

    def note(self, reason: Reason) -> None:
        """Report that a backward has run on the stock engine."""
        self._report.fell_back(reason, "a backward ran on the stock engine")


class _Repetition:
    """Counts the new structures of one session, to decide whether the next backward is worth capturing.

    Capturing takes as long as ten or twenty backwards in the stock engine. So if a program has a different
    graph in each step (a mixture of experts), we leave it to the engine. We inspect its graph from time to
    time, and capture backwards again once a graph recurs.
    """

    def __init__(self) -> None:
        self._reason: Reason | None = None
        self._spent = 0
        self._last: BackwardGraph | None = None
        self._looks, self._passed = LOOKS, 0
        self._seen: deque[int] = deque(maxlen=LOOKS_KEPT)

    def runs(self, plan: Plan) -> None:
        """Count a plan that is about to run."""
        if plan.report.runs:
            self._spent = max(0, self._spent - 1)
            return
        graph = plan.report.graph
        if self._spent + PAYS_BACK > MOST_NEW * PAYS_BACK and self._last is not None:
            text = f"of the last backwards, {MOST_NEW} or more had a new structure"
            text = f"{text}: {first_difference(self._last, graph)}"
            plan.postpone(text)  # compile it only if it recurs
            self._reason = _reason("nothing-repeats", text)
        self._last = graph
        self._spent = min(self._spent + PAYS_BACK, MOST_NEW * PAYS_BACK)

    def why_not(self, request: EngineRequest) -> Reason | None:
        """Why `request` is not worth capturing; None if structures repeat as far as we know."""
        reason = self._reason
        if reason is None:
            return None
        self._passed += 1
        if self._passed < self._looks:
            return reason
        self._passed, names = 0, hash(names_of_nodes(request))
        if names not in self._seen:
            self._seen.append(names)
            return reason
        # Wait longer before the next inspection, in case this was a mistake.
        self._reason = self._last = None
        self._spent, self._looks = 0, self._looks * LOOKS
        self._seen.clear()
        return None


def _checked(request: EngineRequest, grads: Grads) -> Grads:
    """For ``autograd.grad``: return the gradients, or raise eager's error for an input that was not
    reached."""
    if request.accumulate_grad:
        return ()
    grads = grads[: len(request.inputs)]
    unreached = [grad is None for grad in grads]
    if not request.allow_unreachable and any(unreached):
        _raise_unreached(unreached.index(True))
    return grads


def _raise_unreached(position: int) -> None:
    """Raise what ``autograd.grad`` of the installed torch raises if input number `position` is the first
    unreached one."""
    with torch.enable_grad():
        reached = torch.zeros((), requires_grad=True)
        root = reached.clone()
        unreached = torch.zeros((), requires_grad=True)
    run_stock(EngineRequest((root,), (torch.zeros(()),), False, False, (*[reached] * position, unreached)))
    raise AssertionError("torch accepted an unreached input")


def _compilations() -> int:
    return sum(counters[name] for name in ("captures", "plans", "lowerings"))


def _reason(code: str, text: str) -> Reason:
    return Reason(
        code, text.split("\n", 1)[0].strip(), "live.capture", way_out=_WAY_OUT.get(code, _WAY_OUT[""])
    )


def _reason_of(error: Exception) -> Reason:
    """The reason for a capture that raised."""
    if isinstance(error, CaptureError):
        return error.reason
    if isinstance(error, Refusal):
        return _reason(error.code, str(error))
    if DDP in str(error):
        return replace(_reason("capture-failed", _IN_CPP), way_out=_IN_PYTHON)
    return _reason("capture-failed", first_line(error))


_IN_CPP = (
    "DDP's reducer keeps its C++ hooks: other parameters require grad than when DDP wrapped the module, "
    "wrapped modules share parameters, or there are hooks on nodes of parameters"
)

_IN_PYTHON = "freeze parameters before wrapping, and register hooks on parameters instead of nodes"

_LENIENT = "without strict=True, it runs eagerly, and retrograd.explain() says so"

_WAY_OUT = {
    "": "nothing to do: such a backward runs eagerly; retrograd.explain() lists all reasons",
    "nothing-repeats": (
        "nothing to do: capturing would cost more than it saves; strict=True captures nevertheless"
    ),
    "nested-too-deep": "nothing to do: the outer backwards are compiled, this one runs as eager runs it",
    "nested-in-engine-frame": "register a hook that stores the gradient instead of calling retain_grad()",
    "cpp-function-kept": "declare `static constexpr bool is_traceable = true` if it keeps no state",
    "reentered-graph": "retain_graph=True has it compiled; or keep apart what the hook differentiates",
    "transform": "torch.autograd.grad, or .backward()",
    "differentiable": "nothing to do: the backward through what it leaves behind is compiled",
    "nested-small": "nothing to do; strict=True captures nevertheless",
    "measured": "nothing to do; strict=True, or torch.use_deterministic_algorithms(True), measures nothing",
    "compiled-already": "nothing to do; strict=True captures nevertheless",
    "engine-busy": "run the backwards of several threads one after the other to have them compiled",
}

_TRANSFORM = _reason(
    "transform",
    "torch.func (grad, vjp, jacrev, …) differentiated inside the context: that backward was not captured",
)

_DIFFERENTIABLE = _reason(
    "differentiable",
    "under create_graph=True autograd records each operation of the backward: there is nothing to compile",
)

_SMALL_NESTED = _reason(
    "nested-small",
    "a backward inside another has so few nodes that torch's engine runs it sooner than it is collected",
)

_MEASURED = _reason(
    "measured", "some backwards ran on torch's engine, to compare its time with compiled code's"
)

_COMPILED_ALREADY = _reason(
    "compiled-already",
    "at least half of the backward is that of a compiled forward: torch's engine runs it",
)

_NO_STATE = _reason(
    "cpp-function-kept",
    "a C++ function that is not traceable may keep state for the next backward of the retained graph",
)

#: In how many running plans of its thread a backward may be nested. Eager nests 60 deep, then continues on
#: another thread with a fresh stack. A plan takes 19 of Python's 1000 frames where eager takes 4.
MOST_NESTED = 4

TOO_DEEP = _reason(
    "nested-too-deep", f"a backward nested in more than {MOST_NESTED} others: Python's stack is short"
)
