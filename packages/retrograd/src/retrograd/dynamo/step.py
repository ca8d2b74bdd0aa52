"""Compiles a whole training step: forward, backward, hooks and optimizers behind one callable.

In: a function that runs a training step, and the user's settings. Out: a callable that does the same, with a
report. Dynamo compiles the Python of the step, so it knows what the step reads and changes. At a call of
``backward``, Dynamo's graph ends, and the live path runs the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from retrograd.backends.registry import find_backend
from retrograd.config import Config, checked
from retrograd.dynamo.backend import ConfiguredBackend
from retrograd.dynamo.frames import compiled_frames
from retrograd.dynamo.left_to_python import LeftToPython
from retrograd.errors import Reason
from retrograd.live.contexts import enter, leave
from retrograd.live.session import Session
from retrograd.policy import SHORT_STEP
from retrograd.probe import check_supported
from retrograd.process import restored_on_error
from retrograd.progress import watched
from retrograd.report import Report, process_report
from retrograd.report_text import counted
from retrograd.runtime.cuda import unused_memory_returned
from retrograd.runtime.decorated import Decorated
from retrograd.runtime.modes import compile_stance
from retrograd.specialize.profitability import Pace
from retrograd.trace import tracer_here

_STEP = callable, "a function that makes a training step"


@dataclass(eq=False)
class StepReport:
    """The report of one step.

    Attributes:
        name: of the step.
        pieces: the graphs from Dynamo, the backwards, and what ran as in eager.
        left_to_python: what is not traced, because its results would differ from eager's.
        eager: how many calls ran eagerly.
        compiled: how many calls ran compiled.
        disabled: why the step runs eagerly from now on; None if it does not.
    """

    name: str
    pieces: Report
    left_to_python: set[str]
    eager: int = 0
    compiled: int = 0
    disabled: Reason | None = None

    @property
    def calls(self) -> int:
        """The number of calls."""
        return self.eager + self.compiled

    @property
    def compilations(self) -> int:
        """How many graphs and backwards were captured, and segments lowered. While this grows, the step is
        not steady."""
        lowerings = sum(len(backward.lowerings) for backward in self.pieces.backwards)
        return len(self.pieces.graphs) + len(self.pieces.backwards) + lowerings

    def _headed(self, text: str) -> str:
        lines = [f"step {self.name}: {counted(self.compiled, 'call')} compiled, {self.eager} eager"]
        lines += [
            f"the {what} runs in eager: traced, it would round differently" for what in self.left_to_python
        ]
        lines += [str(self.disabled)] if self.disabled is not None else []
        return "\n".join([*lines, text])

    def __str__(self) -> str:
        return self._headed(str(self.pieces))

    def details(self) -> str:
        """The long text, see `Report.details`."""
        return self._headed(self.pieces.details())

    def save_html(self, path: str | PathLike[str]) -> None:
        """Write the pieces as an HTML page, see `Report.save_html`."""
        self.pieces.save_html(path)

    def _repr_html_(self) -> str:
        return self.pieces._repr_html_()


class CompiledStep(Decorated):
    """A step that compiles itself. Made by `compile_step`.

    Attributes:
        fn: the step.
        config: the settings.
    """

    @checked(fn=_STEP, config=(Config, "a retrograd.Config"))
    def __init__(self, fn: Callable[..., Any], config: Config) -> None:
        super().__init__(fn, config)
        self.reset()

    def reset(self) -> None:
        """Drop the report and all compiled code."""
        pieces = Report(above=process_report)
        watch = LeftToPython(f"the step {self.__name__}", self.config, pieces)
        self._report = StepReport(self.__name__, pieces, watch.found)
        self._session = Session(self.config, pieces)
        self._pace = None if self.config.cudagraphs else Pace(self.__name__, "step", SHORT_STEP)
        self._compiled = compiled_frames(
            self.fn,
            ConfiguredBackend(self.config, key=(object(),)),  # equals no other: `reset` drops its code
            watch,
            dynamic=self.config.dynamic,
            recompile_limit=self.config.recompile_limit,
            are_numbers_exact=watch.computes_like_eager,
        )

    def explain(self) -> StepReport:
        """How the calls ran, and which pieces the step was divided into, with the reasons."""
        return self._report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step.

        Raises:
            RetrogradError: a piece cannot be compiled, if ``strict``.
            Exception: whatever the step raises.
        """
        if torch.compiler.is_dynamo_compiling() or tracer_here() or compile_stance() == "force_eager":
            return self.fn(*args, **kwargs)
        if self._report.calls == 0 or self._compiled is self.fn:
            with unused_memory_returned() if self.config.cudagraphs else nullcontext():
                return self._run(self.fn, args, kwargs, is_compiled=False)
        if self._pace and not self._pace.is_worth_compiling():
            return self._run(self.fn, args, kwargs, is_compiled=False)
        return restored_on_error(self._run_compiled, args, kwargs)

    def _run_compiled(self, args: Any, kwargs: Any) -> Any:
        enter(self, self._session)
        try:
            with nullcontext() if self._report.compiled else self._watched():
                return self._run(self._compiled, args, kwargs, is_compiled=True)
        finally:
            leave(self)

    def _watched(self) -> AbstractContextManager[None]:
        """Use this around the first compiled call, which may take a minute."""
        report = self._report
        return watched(
            f"the first compiled call of the step {self.__name__}",
            lambda: f"{report.compilations} graphs, backwards and segments done",
        )

    def _run(self, run: Callable[..., Any], args: Any, kwargs: Any, is_compiled: bool) -> Any:
        self._report.compiled += is_compiled
        self._report.eager += not is_compiled
        if self._pace is None:
            return run(*args, **kwargs)
        with self._pace.timed(is_compiled, lambda: self._report.compilations):
            result = run(*args, **kwargs)
        self._report.disabled = self._pace.disabled
        return result


@checked(step=(lambda step: step is None or callable(step), _STEP[1]))
def compile_step(
    step: Callable[..., Any] | None = None,
    /,
    *,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    strict: bool = False,
    recompile_limit: int = 8,
    regions: bool | int = True,
    cudagraphs: bool = False,
    whole_after: int | None = 2_000,
    compile_timeout: float | None = None,
    stock_dynamo: bool = False,
) -> Any:
    """Compile a training step: forward, backward, hooks and optimizers.

    Dynamo compiles the step as ``torch.compile`` does, with our backend for its graphs. The live path runs
    its backwards. The step may print, log, append to lists, use NumPy, and call ``.item()`` or a scheduler.
    Where Dynamo cannot trace, it divides the step into pieces. ``step.explain()`` lists them with the
    reasons. With ``backend="eager"``, parameters, optimizer states, gradients and results equal eager's bit
    for bit, and torch's optimizers are not compiled. Other backends compile optimizers too.

    The first call runs eagerly, so that the states of optimizers and lazy modules, and the gradients, exist.
    If a step takes less than a second and is slower compiled than eager, it runs eagerly from then on, and
    the report says so. It stays compiled under ``torch.use_deterministic_algorithms``. It also stays compiled
    with `cudagraphs`: an eager step, to compare with, would need memory in addition to that of the
    recordings.

    Args:
        step: the function or method; without it, a decorator is returned.
        backend: as in `compiled_autograd`, for all graphs.
        dynamic: as in ``torch.compile``.
        strict: raise an error if something cannot be compiled, instead of running it eagerly. A graph break
            between pieces is not an error.
        recompile_limit: how often one piece is compiled. After that it runs eagerly.
        regions: as in `compiled_autograd`.
        cudagraphs: record what each piece does on a CUDA device, and replay it where that is safe.
        whole_after: as in `Config`, for the calls of each piece.
        compile_timeout: as in `compiled_autograd`, for each piece.
        stock_dynamo: leave each ``autograd.Function``, and module hooks, to Dynamo, which loses part of what
            they do.

    Returns:
        A `CompiledStep`: called like `step`, with ``explain()`` and ``reset()``.

    Raises:
        OptionError: an option has an invalid value.
        UnsupportedTorchError: the installed torch lacks something that we need.

    Example:
        >>> @retrograd.compile_step
        ... def step(x, y):
        ...     opt.zero_grad()
        ...     loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     opt.step()
        ...     return loss
    """
    config = Config(**{name: value for name, value in locals().items() if name != "step"})
    find_backend(backend)
    check_supported()
    if step is None:
        return lambda fn: CompiledStep(fn, config)
    return CompiledStep(step, config)
