"""Stock PyTorch's compilers: torch.compile of the forward, and compiled autograd around the backward.

In: a backend's name. Out: subjects "stock-compile:<backend>", "stock-ca:<backend>" and "compile:<backend>".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from gradparity.subjects import places
from gradparity.subjects.base import Subject

T = TypeVar("T")


FALLBACK_RANDOM = """
def around_program():
    import torch._inductor.config as inductor_config

    return inductor_config.patch(fallback_random=True)
"""
BY_COMPILE = """
def by_subject(target):
{imports}    return torch.compile(target, backend={backend})
"""
BY_COMPILED_AUTOGRAD = """
def around_backward():
    import torch._dynamo.compiled_autograd as compiled_autograd

    return compiled_autograd._enable(torch.compile(backend={backend!r}))
"""


class DynamoSubject(Subject):
    """What all subjects that go through Dynamo share: reset, counters, hooks kept out of tracing."""

    may_refuse = True

    def __init__(self, name: str, backend: str, own_random: bool = False) -> None:
        super().__init__(name)
        self.backend, self.own_random = backend, own_random
        self._before = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        """Eager's random numbers in compiled code too, unless it shall draw its own."""
        import torch._inductor.config as inductor_config

        with inductor_config.patch(fallback_random=not self.own_random):
            yield

    def wrap_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Recording is not part of the program: Dynamo must not trace it."""
        import torch._dynamo

        wrapped: Callable[..., Any] = torch._dynamo.disable(hook)
        return wrapped

    def begin(self) -> None:
        """Remembers Dynamo's count of graphs."""
        self._before = self._count()

    def compiles(self) -> int:
        """Graphs compiled since `begin`."""
        return self._count() - self._before

    def reset(self, cold: bool) -> None:
        """Always forgets: Dynamo's recompile limits would leak from case to case."""
        torch._dynamo.reset()

    def _count(self) -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"] + counters["compiled_autograd"]["captures"])


class StockCompile(DynamoSubject):
    """torch.compile of the program's functions and modules; plain backward. A backend answers for its
    divergences, but not for those that stock has without a code generator.

    Args:
        name: of the subject.
        backend: a registered name, or the function's place as ``module:function`` or ``file.py:function``.
        own_random: whether it draws other random numbers than eager.
    """

    def __init__(self, name: str, backend: str, own_random: bool = False) -> None:
        super().__init__(name, backend, own_random)
        self.place = backend
        self.stage = STAGES.get(backend, backend)
        if backend not in STAGES:
            self.accountable = True
            self.stock = StockCompile("stock-compile:aot_eager", "aot_eager")
        if backend not in (*STAGES, "inductor") and not own_random:
            self.as_shipped = StockCompile(name, backend, own_random=True)

    @property
    def script(self) -> str:
        """As a user calls torch.compile."""
        imports, backend = places.in_script(self.backend)
        random = "" if self.own_random else FALLBACK_RANDOM
        return BY_COMPILE.format(imports=imports, backend=backend) + "\n" + random

    def compile(self, target: T) -> T:
        """The function or module under torch.compile."""
        compiler: Any = torch.compile
        compiled: T = compiler(target, backend=places.backend_of(self.backend))
        return compiled


STAGES = {"eager": "dynamo", "aot_eager": "aot_eager"}
"""Backends that generate no code, and the stages that they show: nothing before them could be blamed."""


class StockCompiledAutograd(DynamoSubject):
    """Eager forward; stock compiled autograd around the backward. It answers as `StockCompile` does."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name, backend)
        self.stage = "capture" if backend == "eager" else backend
        if backend not in STAGES:
            self.accountable = True
            self.stock = StockCompiledAutograd("stock-ca:aot_eager", "aot_eager")

    @property
    def script(self) -> str:
        """As torch's own tests switch compiled autograd on."""
        return BY_COMPILED_AUTOGRAD.format(backend=self.backend) + "\n" + FALLBACK_RANDOM

    def backward(self) -> AbstractContextManager[Any]:
        """Compiled autograd with torch.compile as its compiler."""
        import torch._dynamo.compiled_autograd as compiled_autograd

        compiler = torch.compile(backend=self.backend)
        context: AbstractContextManager[Any] = compiled_autograd._enable(compiler)
        return context
