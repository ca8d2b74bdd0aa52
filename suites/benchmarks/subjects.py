"""The ways to run a backward that the benchmarks compare, each a context to call `.backward()` in.

In: a subject's name. Out: a function that opens its context. Names say who compiles and through what: `trace`
stops where the backend's own compile would begin, and so does `aot_eager`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from asv_runner.benchmarks.mark import SkipNotImplemented

#: Where the benchmarks run on this machine.
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)

Context = Callable[[], AbstractContextManager[Any]]


def without_compile(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that compiles nothing: what is left is capture and tracing."""
    return graph.forward


def retrograd_with(backend: Any) -> Context:
    """retrograd's live path, lowering through `backend`; one context, entered for every backward."""
    import retrograd

    context = retrograd.compiled_autograd(backend=backend)
    return lambda: context


def stock_with(backend: str, *, dynamic: bool) -> Context:
    """Compiled autograd of stock torch; `dynamic=True` is its default."""
    from torch._dynamo import compiled_autograd

    compiler = torch.compile(backend=backend)
    return lambda: compiled_autograd._enable(compiler, dynamic=dynamic)


SUBJECTS: dict[str, Callable[[], Context]] = {
    "eager": lambda: nullcontext,
    "retrograd-trace": lambda: retrograd_with(without_compile),
    "retrograd-eager": lambda: retrograd_with("eager"),
    "retrograd-inductor": lambda: retrograd_with("inductor"),
    "stock-aot_eager": lambda: stock_with("aot_eager", dynamic=True),
    "stock-aot_eager-static": lambda: stock_with("aot_eager", dynamic=False),
}


def present(subjects: Iterable[str]) -> list[str]:
    """Those of the subjects that can run here: benchmarks also run on commits without retrograd."""
    missing = "retrograd" if importlib.util.find_spec("retrograd") is None else None
    return [subject for subject in subjects if subject.partition("-")[0] != missing]


def require(is_here: bool, subject: str) -> None:
    """Leave a benchmark out, in asv's way, unless its subject `is_here`; for its `setup`.

    Raises:
        SkipNotImplemented: with the reason, which asv reports as not applicable.
    """
    if not is_here:
        raise SkipNotImplemented(f"no {subject} here")
