"""A whole training step as one graph.

In: a function that runs forward, backward and optimizers. Out: the same, compiled as a whole where that is
right, in pieces where not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from retrograd._torch.probe import check_supported
from retrograd.step.report import StepReport, WholeReport
from retrograd.step.step import CompiledStep, StepConfig

__all__ = ["CompiledStep", "StepReport", "WholeReport", "compile_step"]


def compile_step(
    step: Callable[..., Any] | None = None,
    /,
    *,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    strict: bool = False,
    recompile_limit: int = 8,
) -> Any:
    """Compile a training step as one graph: forward, backward, hooks and optimizers.

    The first call runs eagerly, so that optimizers and lazy modules make their state. The second is traced:
    the step's Python runs once, on stand-ins of the tensors that it reaches, with torch's own engine behind
    ``backward``. From then on the graph runs, as long as its guards hold: on the arguments, on what the step
    reaches (parameters by identity, modes of modules, hooks, numbers in optimizers' groups, globals and
    attributes that the code which ran speaks of) and on torch's settings. A learning rate that changes
    becomes an input.

    What a graph cannot do runs in pieces: the step as Python runs it, its backwards compiled on the live
    path. That is so if it prints, reads a clock or the value of a tensor that decides what comes next,
    appends to a list, sets an attribute, returns a tensor whose graph can still be used, or uses a tensor
    with a history from outside. ``step.explain()`` gives the reasons.

    With ``backend="eager"`` and static sizes, parameters, states, gradients and results equal eager's bit for
    bit.

    Args:
        step: the function; without it, a decorator is returned. Modules, optimizers and tensors are found in
            its arguments, closure, defaults, globals, and in the object of a method.
        backend: as in `compiled_autograd`. ``inductor`` gets numbers of an optimizer as tensors of float64.
        dynamic: None: sizes of arguments are static until they change; True: symbolic from the start; False:
            static.
        strict: raise instead of running in pieces.
        recompile_limit: captures after which other situations run in pieces.

    Returns:
        A `CompiledStep`: called like `step`, with ``explain()`` and ``reset()``.

    What it returns requires grad where eager's does, but its graph counts as used up: a backward through it
    raises what torch raises for a second backward.

    Raises:
        UnknownBackendError: `backend` is neither a known name nor a callable.
        UnsupportedTorchError: torch does not offer what this stands on.
        CaptureError: when it is called, if `strict`.

    Example:
        >>> @retrograd.compile_step
        ... def step(x, y):
        ...     opt.zero_grad()
        ...     loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     opt.step()
        ...     return loss
    """
    if step is None:
        return functools.partial(
            compile_step, backend=backend, dynamic=dynamic, strict=strict, recompile_limit=recompile_limit
        )
    check_supported()
    return CompiledStep(step, StepConfig(backend, dynamic, strict, recompile_limit))
