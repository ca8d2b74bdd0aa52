"""Lower boxed functions at first use, and again when their guards fail.

In: a function over a list of values (a segment, or a derivative of one) and the values that arrive. Out: its
outputs, computed by the backend's code or, where that is not possible, by the function itself, with a reason
either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import copied
from retrograd._torch.state import ThreadModes, compile_stance, why_interpreted_now, without_torch_functions
from retrograd._torch.subclass import SubclassBorder, is_wrapper
from retrograd._torch.trace import InputGuard, Traced, changed_sizes, is_batched, trace
from retrograd.backends.background import Later, begin
from retrograd.backends.base import Boxed
from retrograd.cudagraphs.graphed_call import graphed
from retrograd.errors import LoweringError, Reason, Refusal, first_line
from retrograd.events import counters, live_log
from retrograd.live.lower.derivatives import Differentiable
from retrograd.live.lower.determinism import determinism_is_on, operations_may_warn
from retrograd.live.lower.lowered import How, Lowered, Lowerings
from retrograd.report import LoweringReport

Symbolic = dict[int, frozenset[int]]


class BoxedRunner:
    """Runs one boxed function: lowers it at first use, and again when guards fail.

    Args:
        fn: the function as captured.
        how: how to lower it.
        interpret_because: why it is never lowered; None if it may be.
        shared: what has come of lowering an equal function elsewhere.
    """

    def __init__(
        self, fn: Boxed, how: How, interpret_because: str | None = None, shared: Lowerings | None = None
    ) -> None:
        self._run_as_captured, self._how = fn, how
        self._shared = shared or Lowerings()
        self._number, self._config = how.number, how.config
        self._backend, self._log = how.backend, how.log
        self._lowered: list[Lowered] = []
        self._graphed: dict[Lowered, Boxed] = {}
        self._symbolic: Symbolic = {}
        self._interpret_because = interpret_because
        self._told: set[str] = set()
        self._postponed = ("", 0)

    def postpone(self, because: str, runs: int = 1) -> None:
        """Interpret the next `runs`, if nothing is compiled yet."""
        if not self._lowered:
            self._postponed = because, runs

    def _postponed_now(self) -> str | None:
        because, runs = self._postponed
        if not runs:
            return None
        self._postponed = because, runs - 1
        return because

    # for plans that have settled

    @property
    def is_interpreted(self) -> bool:
        """Whether it will never be lowered (again)."""
        return self._interpret_because is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it is interpreted for the time being, and will have code."""
        return self._postponed[1] > 0 or any(lowered.later is not None for lowered in self._lowered)

    @property
    def is_static(self) -> bool:
        """Whether it was lowered last with every size fixed."""
        return bool(self._lowered) and self._lowered[0].guard.is_static

    @property
    def captured(self) -> Boxed:
        """The function as captured."""
        return self._run_as_captured

    @without_torch_functions
    def direct_code(self, args: list[Any]) -> Lowered | None:
        """What `run` would run for these values, if nothing has to be decided when it runs but its guards;
        `args` stays as it is."""
        if self.is_waiting or determinism_is_on() or why_interpreted_now(args) is not None:
            return None
        modes = ThreadModes.now()
        fitting = (lowered for lowered in self._lowered if lowered.modes == modes)
        return next((lowered for lowered in fitting if lowered.is_direct and lowered.guard.check(args)), None)

    def failed(self, error: Exception) -> None:
        """Code that `direct_code` gave has raised."""
        counters["run_failures"] += 1
        if not isinstance(error, torch.OutOfMemoryError):
            self._distrust(error)

    # run

    def run(self, args: list[Any]) -> Sequence[Any]:
        """The function's outputs; `args` is emptied."""
        if self._interpret_because is not None:
            return self._interpret(args)
        now = self._postponed_now() or why_interpreted_now(args)
        if now is None and torch.is_grad_enabled() and any(map(is_wrapper, args)):
            now = "tensor subclasses in grad mode"
        if now is not None:
            return self._interpret_now(args, now)
        found = self._lowered_for(args)
        if found is None:
            return self._interpret(args)
        lowered, flat = found
        if lowered.later is not None and not self._has_arrived(lowered):
            return self._interpret(args)
        if determinism_is_on() and not lowered.is_deterministic:
            # Eager may have to raise. Where it warns it does so each time.
            results = self._interpret(args)
            lowered.is_deterministic = not operations_may_warn()
            return results
        return self._run(lowered, args, flat)

    def _interpret(self, args: list[Any]) -> Sequence[Any]:
        return self._run_as_captured(args)

    def _interpret_now(self, args: list[Any], because: str) -> Sequence[Any]:
        if because not in self._told:
            self._told.add(because)
            self._tell("interpreted", "", because)
        return self._interpret(args)

    def _has_arrived(self, lowered: Lowered) -> bool:
        """Whether code that was to be compiled in the background is there."""
        later = lowered.later
        assert later is not None
        if later.error is not None:
            self._give_up(f"{type(later.error).__name__}: {later.error}".splitlines()[0], later.error)
        elif later.code is not None:
            lowered.run, lowered.later = later.code, None
        return lowered.later is None

    def _run(self, lowered: Lowered, args: list[Any], flat: list[Any]) -> Sequence[Any]:
        """Run compiled code. Until it has run once its inputs are held, so that a failure costs nothing but
        the compilation; after that they are let go as it goes on, and a failure can only be reported."""
        held = None if lowered.has_run else list(args)
        try:
            results = lowered(args, flat, self.code_of(lowered))
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
                self._give_up(f"its code failed: {first_line(error)}", error)
            return self._interpret(held)
        lowered.has_run = True
        return results

    def code_of(self, lowered: Lowered) -> Boxed:
        """The code, recorded as a CUDA graph if that is wanted: for this place alone, for another place that
        runs the same code has its inputs elsewhere."""
        if not self._config.cudagraphs:
            return lowered.run
        if lowered not in self._graphed:
            self._graphed[lowered] = graphed(lowered.run, lowered.graph, tell=self._log.noted)
        return self._graphed[lowered]

    def _distrust(self, error: Exception) -> None:
        """Code that had worked failed: this backward is lost, the next one interprets the segment."""
        because = f"its code failed: {first_line(error)}"
        self._interpret_because = because
        error.add_note(f"segment {self._number} of this backward is interpreted from now on: {because}")
        self._tell("interpreted", "", because)

    # lower

    @without_torch_functions
    def _lowered_for(self, args: list[Any]) -> tuple[Lowered, list[Any]] | None:
        """Code for these values, made now if need be, and what it takes; None if the function is to be
        interpreted."""
        try:
            modes = ThreadModes.now()
            for lowered in self._lowered:
                if lowered.modes == modes and (flat := lowered.flat(args)) is not None:
                    return lowered, flat
            return self._taken_over(args, modes) or self._lower(args)
        except LoweringError:
            raise
        except Refusal as error:
            self._give_up(str(error), error)
            return None
        except Exception as error:
            self._give_up(first_line(error), error)
            return None

    def _taken_over(self, args: list[Any], modes: ThreadModes) -> tuple[Lowered, list[Any]] | None:
        """Code that was made for an equal function, if it fits."""
        for lowered in self._shared.codes:
            if lowered.modes == modes and lowered not in self._lowered:
                flat = lowered.flat(args)
                if flat is not None:
                    self._lowered.insert(0, lowered)
                    counters["shared_lowerings"] += 1
                    self._tell(self._backend.name, lowered.guards(), "shared with an equal segment")
                    return lowered, flat
        return None

    def _lower(self, args: list[Any]) -> tuple[Lowered, list[Any]] | None:
        """A new lowering for these values; None if the function is to be interpreted this time."""
        if any(map(is_batched, args)):
            return None  # by the engine, for one backward with is_grads_batched
        if self._shared.interpret_because is not None:
            self._give_up(self._shared.interpret_because)
            return None
        border, flat = _border(args)
        because = self._note_changes(args, flat, border)
        if len(self._lowered) >= self._config.recompile_limit:
            self._interpret_because = f"recompile limit of {self._config.recompile_limit} reached: {because}"
            self._tell("interpreted", "", self._interpret_because)
            return None
        if self._stance_refuses(because):
            return None
        lowered = self._compile(flat, border)
        recompile = bool(self._lowered)
        self._lowered.insert(0, lowered)
        self._shared.codes.insert(0, lowered)
        counters["lowerings"] += 1
        counters["recompiles"] += recompile
        self._tell(self._backend.name, lowered.guards(), because, lowered.graph, recompile)
        return lowered, flat

    def _compile(self, args: Sequence[Any], border: SubclassBorder | None) -> Lowered:
        run_flat = self._run_noted if border is None else border.flattened(self._run_noted)
        with self._log.stage("trace"):
            traced = self._traced(run_flat, args)
        graph = copied(traced.gm.graph)  # a backend may rewrite the one that it is given
        guard = InputGuard(args, traced.fed, traced.example_inputs, traced.shape_env)
        run, later = self._code(traced, args if border is None else None)
        lowered = Lowered(guard, ThreadModes.now(), run, traced.fed, traced.given, graph, border, later=later)
        if traced.history is not None:
            lowered.differentiable = Differentiable(
                self._run_as_captured, args, traced.history, self._another
            )
        return lowered

    def _traced(self, run: Boxed, args: Sequence[Any]) -> Traced:
        decompositions = self._backend.decompositions()
        try:
            return trace(run, args, self._symbolic or None, decompositions)
        except Refusal as error:
            if error.code != "symbolic-metadata":
                raise
            return trace(run, args, None, decompositions)

    def _code(self, traced: Traced, args: Sequence[Any] | None) -> tuple[Boxed, Later | None]:
        """The backend's code, or the promise of it, for a function traced for `args` (None: for the parts of
        tensor subclasses).

        Nobody may see a difference where determinism is asked for, nor run a derivative before the function
        has its code.
        """
        compile = partial(self._backend.compile, traced.gm, traced.example_inputs)
        patience = self._config.patience
        if patience is not None and not determinism_is_on() and traced.history is None:
            later = begin(compile, patience)
            return (_not_there, later) if later.code is None else (later.code, None)
        with self._log.stage("compile"):
            return compile(), None

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

    def _note_changes(self, args: list[Any], flat: list[Any], border: SubclassBorder | None) -> str:
        """Sizes that differ from the last lowering become symbolic; says what failed."""
        last = self._lowered[0] if self._lowered else None
        if last is None or not _is_alike(last.border, args):
            self._symbolic = self._initially_symbolic(flat, border.numbers if border else frozenset())
            return "first use" if last is None else f"another class or metadata: {last.border} / {border}"
        if last.modes != ThreadModes.now():
            return last.modes.difference(ThreadModes.now())
        if self._config.dynamic is not False:
            for index, dims in changed_sizes(last.guard.args_metadata, flat).items():
                self._symbolic[index] = self._symbolic.get(index, frozenset()) | dims
        return last.guard.why_not(flat)

    def _initially_symbolic(self, args: Sequence[Any], outer: frozenset[int]) -> Symbolic:
        """Sizes that reach the segment as numbers are those that the engine saw change: they are symbolic
        from the start, and so are dimensions of the same extent (`outer`: those of subclass tensors)."""
        if self._config.dynamic is False:
            return {}
        moving = {value for i, value in enumerate(args) if type(value) is int and i not in outer}
        symbolic: Symbolic = {}
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                dims = [d for d, s in enumerate(value.shape) if self._config.dynamic or s in moving]
                symbolic[i] = frozenset(dims)
            elif type(value) is int and (i not in outer or self._config.dynamic or value in moving):
                symbolic[i] = frozenset({0})
        return {i: dims for i, dims in symbolic.items() if dims}

    # tell

    def _give_up(self, text: str, error: BaseException | None = None) -> None:
        """This function cannot be compiled: interpret it from now on, or raise in strict mode."""
        way_out = "name the node in opaque=, or leave it: only this segment runs uncompiled"
        reason = self._reason(f"segment {self._number} is interpreted: {text}", way_out)
        if self._config.strict:
            raise LoweringError(reason) from error
        if error is not None and not isinstance(error, Refusal):
            live_log.info("%s", reason, exc_info=error)
        self._interpret_because = self._shared.interpret_because = text
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


def _border(args: list[Any]) -> tuple[SubclassBorder | None, list[Any]]:
    """The border of these values, if there is a subclass among them, and the flat values behind it."""
    if not any(map(is_wrapper, args)):
        return None, args
    border = SubclassBorder(args)
    flat = border.enter(args)
    assert flat is not None
    return border, flat


def _is_alike(border: SubclassBorder | None, args: list[Any]) -> bool:
    """Whether the values have the classes and metadata of those that `border` was made for."""
    return not any(map(is_wrapper, args)) if border is None else border.enter(args) is not None


def _not_there(args: list[Any]) -> Sequence[Any]:
    raise AssertionError("the code of a segment was run before it was there")
