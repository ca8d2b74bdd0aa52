"""The ways to run a backward that the benchmarks compare, each a context to call `.backward()` in.

In: a subject's name. Out: a function that opens its context. Names say who compiles and through what: `trace`
stops where the backend's own compile would begin, and so does `aot_eager`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

#: Where the benchmarks run on this machine.
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)

Context = Callable[[], AbstractContextManager[Any]]


def without_compile(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that compiles nothing: what is left is capture and tracing."""
    return graph.forward


class MissingOptionError(RuntimeError):
    """This retrograd has no such option: what asks for it was not measured."""

    def __init__(self, option: str) -> None:
        super().__init__(f"retrograd.compiled_autograd has no option {option!r} here")


def retrograd_with(backend: Any, **options: Any) -> Context:
    """retrograd's live path, lowering through `backend`; one context, entered for every backward.

    Raises: MissingOptionError for an option that this retrograd does not have.
    """
    import retrograd

    known = inspect.signature(retrograd.compiled_autograd).parameters
    for option in options:
        if option not in known:
            raise MissingOptionError(option)
    context = retrograd.compiled_autograd(backend=backend, **options)
    return lambda: context


def stock_with(backend: Any, *, dynamic: bool) -> Context:
    """Compiled autograd of stock torch; `dynamic=True` is its default."""
    from torch._dynamo import compiled_autograd

    compiler = torch.compile(backend=backend)
    return lambda: compiled_autograd._enable(compiler, dynamic=dynamic)


SUBJECTS: dict[str, Callable[[], Context]] = {
    "eager": lambda: nullcontext,
    "retrograd-trace": lambda: retrograd_with(without_compile),
    "retrograd-eager": lambda: retrograd_with("eager"),
    "retrograd-eager-strict": lambda: retrograd_with("eager", strict=True),
    "retrograd-inductor": lambda: retrograd_with("inductor"),
    "retrograd-inductor-whole": lambda: retrograd_with("inductor", regions=False),
    "retrograd-inductor-cudagraphs": lambda: retrograd_with("inductor", strict=True, cudagraphs=True),
    "stock-aot_eager": lambda: stock_with("aot_eager", dynamic=True),
    "stock-aot_eager-static": lambda: stock_with("aot_eager", dynamic=False),
    "stock-inductor": lambda: stock_with("inductor", dynamic=True),
    "stock-inductor-static": lambda: stock_with("inductor", dynamic=False),
}


def present(subjects: Iterable[str]) -> list[str]:
    """Those of the subjects that can run here: benchmarks also run on commits without retrograd."""
    missing = "retrograd" if importlib.util.find_spec("retrograd") is None else None
    return [subject for subject in subjects if subject.replace("-", ".").partition(".")[0] != missing]


def require(is_here: bool, subject: str) -> None:
    """Leave a benchmark out, in asv's way, unless its subject `is_here`; for its `setup`.

    Raises:
        SkipNotImplemented: with the reason, which asv reports as not applicable.
    """
    if not is_here:
        leave_out(f"no {subject} here")


def leave_out(reason: str) -> NoReturn:
    """Leave a benchmark out, in asv's way, for a reason; for its `setup`.

    Raises: SkipNotImplemented, always.
    """
    from asv_runner.benchmarks.mark import SkipNotImplemented

    raise SkipNotImplemented(reason)
