"""Lower boxed functions at first use, and again when their guards fail.

In: a function over a list of values (a segment, or a derivative of one) and the values that arrive. Out: its
outputs, computed by the backend's code or, where that is not possible, by the function itself, with a reason
either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from retrograd._torch.boxed import copied
from retrograd._torch.guards import InputGuard, changed_sizes
from retrograd._torch.locks import ForkSafeLock
from retrograd._torch.stance import compile_stance
from retrograd._torch.thread_state import modes_of_lowering, why_interpreted_now, why_modes_differ
from retrograd._torch.tracing import NotTraceableError, is_batched, trace, why_not_traceable
from retrograd.backends.base import Backend, Boxed
from retrograd.config import Config
from retrograd.errors import LoweringError, Reason
from retrograd.events import counters, live_log
from retrograd.graph.report import LoweringReport
from retrograd.live.determinism import NondeterministicError, determinism_is_on, run_deterministically
from retrograd.live.differentiable import Differentiable
from retrograd.live.plan_log import PlanLog

__all__ = ["BoxedRunner", "How"]

Symbolic = dict[int, frozenset[int]]

#: tracing patches torch globally while it runs: one thread at a time.
_one_at_a_time = ForkSafeLock()


@dataclass(eq=False)
class Lowered:
    """One lowering: code, and what must hold for its use.

    Attributes:
        guard, modes: must hold. run: the backend's code, which takes the arguments at `fed` and whose results
            stand at `given`. graph: the ATen graph.
        differentiable: records what was run, for a derivative; None where eager would record nothing.
        has_run: whether it has once. is_deterministic: None until it had to be found out.
    """

    guard: InputGuard
    modes: tuple[object, ...]
    run: Boxed
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    graph: fx.Graph
    differentiable: Differentiable | None = None
    has_run: bool = False
    is_deterministic: bool | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        """The outputs; `args` is emptied."""
        if self.differentiable is None:
            return self._outputs(args)
        values = list(args)
        with torch.no_grad():
            results = self._outputs(args)
        return self.differentiable(results, values)

    def _outputs(self, args: list[Any]) -> list[Any]:
        inputs = [args[i] for i in self.fed]
        args.clear()
        results = self.run(inputs)
        return [None if place is None else results[place] for place in self.given]


@dataclass(frozen=True)
class How:
    """How a function is lowered, and what to call it.

    Attributes:
        number: place of the segment that it belongs to among the segments of its schedule.
        names: the autograd nodes in it.
        config, backend: how to lower it.
        log: is told every lowering.
        role: what it is to the segment; empty for the segment itself.
    """

    number: int
    names: tuple[str, ...]
    config: Config
    backend: Backend
    log: PlanLog
    role: str = ""


class BoxedRunner:
    """Runs one boxed function: lowers it at first use, and again when guards fail.

    Args:
        fn: the function as captured.
        how: how to lower it.
        interpret_because: why it is never lowered; None if it may be.
    """

    def __init__(self, fn: Boxed, how: How, interpret_because: str | None = None) -> None:
        self._run_as_captured, self._how = fn, how
        self._number, self._config = how.number, how.config
        self._backend, self._log = how.backend, how.log
        self._lowered: list[Lowered] = []
        self._symbolic: Symbolic = {}
        self._interpret_because = interpret_because
        self._told: set[str] = set()
        self._postponed: str | None = None

    def postpone(self, because: str) -> None:
        """Interpret the next run, if nothing is compiled yet."""
        if not self._lowered:
            self._postponed = because

    # run

    def run(self, args: list[Any]) -> Sequence[Any]:
        """The function's outputs; `args` is emptied."""
        if self._interpret_because is not None:
            return self._interpret(args)
        now, self._postponed = self._postponed or why_interpreted_now(args), None
        if now is not None:
            return self._interpret_now(args, now)
        lowered = self._lowered_for(args)
        if lowered is None or lowered.is_deterministic is False:
            return self._interpret(args)
        if lowered.is_deterministic is None and determinism_is_on():
            return self._ask_eager(lowered, args)
        return self._run(lowered, args)

    def _interpret(self, args: list[Any]) -> Sequence[Any]:
        return self._run_as_captured(args)

    def _interpret_now(self, args: list[Any], because: str) -> Sequence[Any]:
        if because not in self._told:
            self._told.add(because)
            self._tell("interpreted", "", because)
        return self._interpret(args)

    def _ask_eager(self, lowered: Lowered, args: list[Any]) -> Sequence[Any]:
        """Under deterministic algorithms the first run is eager's: it may have to raise or warn."""
        held = list(args)
        try:
            results = run_deterministically(lambda: self._interpret(args))
        except NondeterministicError as error:
            lowered.is_deterministic = False
            self._tell("interpreted", "", str(error))
            return self._interpret(held)
        lowered.is_deterministic = True
        return results

    def _run(self, lowered: Lowered, args: list[Any]) -> Sequence[Any]:
        """Run compiled code. Until it has run once its inputs are held, so that a failure costs nothing but
        the compilation; after that they are let go as it goes on, and a failure can only be reported."""
        held = None if lowered.has_run else list(args)
        try:
            results = lowered(args)
        except Exception as error:
            counters["run_failures"] += 1
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if held is None:
                if not out_of_memory:
                    self._distrust(error)
                raise
            # Holding the inputs takes memory: without that the code may have what it needs.
            lowered.has_run = out_of_memory
            if not out_of_memory:
                self._give_up(f"its code failed: {_first_line(error)}", error)
            return self._interpret(held)
        lowered.has_run = True
        return results

    def _distrust(self, error: Exception) -> None:
        """Code that had worked failed: this backward is lost, the next one interprets the segment."""
        because = f"its code failed: {_first_line(error)}"
        self._interpret_because = because
        error.add_note(f"segment {self._number} of this backward is interpreted from now on: {because}")
        self._tell("interpreted", "", because)

    # lower

    def _lowered_for(self, args: Sequence[Any]) -> Lowered | None:
        """Code for these values, made now if need be; None if the function is to be interpreted."""
        try:
            modes = modes_of_lowering()
            for lowered in self._lowered:
                if lowered.modes == modes and lowered.guard.check(args):
                    return lowered
            return self._lower(args)
        except LoweringError:
            raise
        except Exception as error:
            self._give_up(_first_line(error), error)
            return None

    def _lower(self, args: Sequence[Any]) -> Lowered | None:
        """A new lowering for these values; None if the function is to be interpreted this time."""
        if any(map(is_batched, args)):
            return None  # by the engine, for one backward with is_grads_batched
        if reason := next(filter(None, map(why_not_traceable, args)), None):
            self._give_up(reason)
            return None
        because = self._note_changes(args)
        if len(self._lowered) >= self._config.recompile_limit:
            self._interpret_because = f"recompile limit of {self._config.recompile_limit} reached: {because}"
            self._tell("interpreted", "", self._interpret_because)
            return None
        if self._stance_refuses(because):
            return None
        with _one_at_a_time:
            lowered = self._compile(args)
        recompile = bool(self._lowered)
        self._lowered.insert(0, lowered)
        counters["lowerings"] += 1
        counters["recompiles"] += recompile
        self._tell(self._backend.name, str(lowered.guard), because, lowered.graph, recompile)
        return lowered

    def _compile(self, args: Sequence[Any]) -> Lowered:
        with self._log.stage("trace"):
            traced = trace(self._run_noted, args, self._symbolic or None, self._backend.decompositions())
        graph = copied(traced.gm.graph)  # a backend may rewrite the one that it is given
        with self._log.stage("compile"):
            run = self._backend.compile(traced.gm, traced.example_inputs)
        guard = InputGuard(args, traced.fed, traced.example_inputs, traced.shape_env)
        lowered = Lowered(guard, modes_of_lowering(), run, traced.fed, traced.given, graph)
        if traced.history is not None:
            lowered.differentiable = Differentiable(
                self._run_as_captured, args, traced.history, self._another
            )
        return lowered

    def _run_noted(self, args: list[Any]) -> Sequence[Any]:
        """As captured, while it is traced."""
        return self._run_as_captured(args)

    def _another(self, fn: Boxed, role: str) -> BoxedRunner:
        """A runner for a derivative of this function."""
        role = f"{role} of its {self._how.role}" if self._how.role else role
        return BoxedRunner(fn, replace(self._how, role=role))

    def _stance_refuses(self, because: str) -> bool:
        """Whether ``torch.compiler.set_stance`` has this function interpreted this time."""
        stance = compile_stance()
        if stance == "fail_on_recompile":
            text = f"segment {self._number} has no code for its inputs, under {stance}: {because}"
            raise LoweringError(self._reason(text, "set another stance with torch.compiler.set_stance"))
        return stance == "eager_on_recompile"

    # sizes that change

    def _note_changes(self, args: Sequence[Any]) -> str:
        """Sizes that differ from the last lowering become symbolic; says what failed."""
        if not self._lowered:
            self._symbolic = self._initially_symbolic(args)
            return "first use"
        if self._lowered[0].modes != modes_of_lowering():
            return why_modes_differ(self._lowered[0].modes, modes_of_lowering())
        last = self._lowered[0].guard
        if self._config.dynamic is not False:
            for index, dims in changed_sizes(last.args_metadata, args).items():
                self._symbolic[index] = self._symbolic.get(index, frozenset()) | dims
        return last.why_not(args)

    def _initially_symbolic(self, args: Sequence[Any]) -> Symbolic:
        """Sizes that reach the segment as numbers are those that the engine saw change: they are symbolic
        from the start, and so are the tensors' dimensions of the same extent."""
        if self._config.dynamic is False:
            return {}
        moving = {value for value in args if type(value) is int}
        symbolic: Symbolic = {}
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                dims = [d for d, s in enumerate(value.shape) if self._config.dynamic or s in moving]
                symbolic[i] = frozenset(dims)
            elif type(value) is int:
                symbolic[i] = frozenset({0})
        return {i: dims for i, dims in symbolic.items() if dims}

    # tell

    def _give_up(self, text: str, error: Exception | None = None) -> None:
        """This function cannot be compiled: interpret it from now on, or raise in strict mode."""
        way_out = "name the node in opaque=, or leave it: only this segment runs uncompiled"
        reason = self._reason(f"segment {self._number} is interpreted: {text}", way_out)
        if self._config.strict:
            raise LoweringError(reason) from error
        if error is not None and not isinstance(error, NotTraceableError):
            live_log.info("%s", reason, exc_info=error)
        self._interpret_because = text
        self._tell("interpreted", "", text)

    def _reason(self, text: str, way_out: str) -> Reason:
        names = ", ".join(self._how.names[:3])
        return Reason("segment-not-compiled", text, "live.lower", node=names, way_out=way_out)

    def _tell(
        self, how: str, guards: str, because: str, graph: fx.Graph | None = None, recompile: bool = False
    ) -> None:
        because = f"{self._how.role}: {because}" if self._how.role else because
        live_log.debug("segment %d: %s, %s", self._number, how, because)
        self._log.lowered(LoweringReport(self._number, how, guards, because, graph, recompile))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
