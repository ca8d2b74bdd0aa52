"""What users call: the context manager, the report, the reset. The only module that knows the stages' order.

In: the user's choices. Out: `CompiledAutograd` contexts and `Report` values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from typing import Any

from retrograd._torch.collect import clear_engine_cache
from retrograd._torch.compiled_forwards import CompiledForwards
from retrograd._torch.engine import Gateway
from retrograd._torch.hook_changes import HookWatch
from retrograd._torch.probe import check_supported
from retrograd._torch.queries import Queries
from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.events import counters
from retrograd.graph.report import Report
from retrograd.live.session import Session, active, forget_warnings, run_backward

__all__ = ["CompiledAutograd", "compiled_autograd", "explain", "reset"]

_process_report = Report()
_gateway = Gateway(run_backward, Queries(), HookWatch(), CompiledForwards())


class CompiledAutograd(ContextDecorator):
    """A context, also usable as a decorator, that compiles every backward of this thread inside it.

    Made by `compiled_autograd`. May be entered again, nested (the innermost wins) and shared by threads.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.report = Report()
        self._session = Session(config, (self.report, _process_report))

    def __enter__(self) -> CompiledAutograd:
        check_supported()
        _gateway.open()
        active.set((*active.get(), self._session))
        return self

    def __exit__(self, *error: object) -> None:
        active.set(active.get()[:-1])
        _gateway.close()

    def explain(self) -> Report:
        """What this context captured and what not."""
        return self.report


def compiled_autograd(
    backend: str | Callable[..., Any] = "inductor",
    *,
    strict: bool = False,
    dynamic: bool | None = None,
    recompile_limit: int = 8,
    opaque: Iterable[str] = (),
) -> CompiledAutograd:
    """Compile every backward that runs inside the returned context.

    Args:
        backend: ``"inductor"``; ``"eager"`` (interprets the captured calls; gradients equal eager's bit for
            bit); ``"aten"`` (interprets the traced ATen graph); or a callable
            ``(gm, example_inputs) -> callable`` that is given the ATen graph of each segment.
        strict: raise instead of running as eager does what cannot be captured or compiled.
        dynamic: None: sizes are static until they change; True: symbolic from the start; False: always
            static.
        recompile_limit: lowerings of one segment after which it is interpreted.
        opaque: names of autograd nodes (``"MulBackward0"``) to be run as opaque calls.

    Returns:
        A context manager, also usable as a decorator.

    Raises:
        UnknownBackendError: `backend` is neither a known name nor a callable.
        UnsupportedTorchError: on entering, if torch does not offer the engine's protocol.

    Example:
        >>> with retrograd.compiled_autograd(backend="eager"):
        ...     loss.backward()
    """
    find_backend(backend)
    return CompiledAutograd(Config(backend, strict, dynamic, recompile_limit, Config.names(opaque)))


def explain(
    fn: Callable[..., Any] | None = None,
    /,
    *args: Any,
    backend: str | Callable[..., Any] = "eager",
    **kwargs: Any,
) -> Report:
    """Say what was captured: node calls, segments, opaque calls, guards, recompiles, fallbacks.

    Args:
        fn: something that runs backwards; it is called with `args` and `kwargs` inside a context of its
            own. Without it, the report is that of the whole process so far.
        backend: as in `compiled_autograd`.

    Returns:
        The report; ``print(report)`` is readable, ``report.print_readable()`` shows the graphs.
    """
    if fn is None:
        return _process_report
    with compiled_autograd(backend) as context:
        fn(*args, **kwargs)
    return context.report


def reset() -> None:
    """Forget all captures, plans, reports and counters, and give all warnings again."""
    clear_engine_cache()
    _process_report.backwards.clear()
    _process_report.fallbacks.clear()
    counters.clear()
    forget_warnings()
