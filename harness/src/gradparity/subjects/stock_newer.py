"""Subjects of stock torch that need a certain feature of it, which not all releases have.

In: a name. Out: the subjects "stock-step:<backend>", "stock-precompile:<backend>", "stock-strict:inductor".
Each needs a `Feature` of torch. Where torch lacks it, to ask for the subject raises UnavailableError.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from gradparity.errors import ReproError, UnavailableError
from gradparity.subjects.base import Subject
from gradparity.subjects.stock import BY_COMPILE, FALLBACK_RANDOM, DynamoSubject, StockCompile

T = TypeVar("T")

BY_STEP = """
def around_program():
    import torch._dynamo.config
    import torch._inductor.config

    torch._dynamo.config.trace_autograd_ops = True
    return torch._inductor.config.patch(fallback_random=True)
"""
BY_STRICT = """
def by_subject(target):
    return torch.compile(target, options={"numerics": "strict"})
"""


@dataclass(frozen=True)
class Feature:
    """A part of torch: where it stands in the package, and the first release that has it."""

    path: str
    since: str

    @property
    def is_there(self) -> bool:
        """Whether the installed torch has it."""
        import torch._dynamo.config
        import torch._inductor.config

        try:
            attrgetter(self.path)(torch)
        except AttributeError:
            return False
        return True

    def describe(self) -> str:
        """The releases that have it, and whether the installed one is among them."""
        missing = "" if self.is_there else f"; not in {torch.__version__}"
        return f"torch {self.since} and later{missing}"


STEP = Feature("_dynamo.config.trace_autograd_ops", "2.11")
PRECOMPILE = Feature("compiler.precompile", "2.14")
STRICT = Feature("_inductor.config.numerics", "2.14")

NEEDS = {
    "stock-step:aot_eager": STEP,
    "stock-step:inductor": STEP,
    "stock-precompile:eager": PRECOMPILE,
    "stock-precompile:inductor": PRECOMPILE,
    "stock-strict:inductor": STRICT,
}
"""By subject, what it needs."""


def newer(name: str) -> Subject:
    """The subject of this name, one of `NEEDS`. Raises UnavailableError if torch lacks what it needs."""
    feature = NEEDS[name]
    if not feature.is_there:
        raise UnavailableError(
            f"subject {name}",
            f"torch {torch.__version__} has no torch.{feature.path}; releases since {feature.since} have it",
            f"pip install 'torch>={feature.since}'",
        )
    return MADE[feature](name, name.partition(":")[2])


class StockStep(StockCompile):
    """torch.compile of the program's functions, modules and whole training steps, where Dynamo traces
    `Tensor.backward` and `torch.autograd.grad` into the graph.
    """

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name, backend)
        if self.stock is not None:
            self.stock = StockStep("stock-step:aot_eager", "aot_eager")

    @property
    def script(self) -> str:
        """As a user calls it, with Dynamo's setting."""
        return BY_COMPILE.format(imports="", backend=repr(self.backend)) + BY_STEP

    @contextmanager
    def around(self) -> Iterator[None]:
        """Dynamo's setting, and eager's random numbers."""
        import torch._dynamo.config as dynamo_config

        with super().around(), dynamo_config.patch(trace_autograd_ops=True):
            yield

    def training_step(self, step: Callable[..., T]) -> Callable[..., T]:
        """The step as one compiled function, with torch's own backward in it."""

        def whole(*args: Any) -> T:
            return step(lambda loss: loss.backward(), *args)

        return self.compile(whole)


class StockStrict(StockCompile):
    """torch.compile with Inductor, asked for eager's numerics."""

    @property
    def script(self) -> str:
        """As a user calls torch.compile."""
        return BY_STRICT + FALLBACK_RANDOM

    def compile(self, target: T) -> T:
        """The function or module under torch.compile."""
        compiler: Any = torch.compile
        compiled: T = compiler(target, backend=self.backend, options={"numerics": "strict"})
        return compiled


class StockPrecompile(DynamoSubject):
    """torch.compiler.precompile of whole training steps; other programs run as eager does.

    What it writes has no autograd graph: a function whose result is differentiated outside cannot be given to
    it. A step is captured at its first call. The modules that it closes over are arguments of the capture.
    So are the leaves that it is given, as parameters of one more module.
    """

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name, backend)
        self.stage = "precompile" if backend == "eager" else backend
        if backend != "eager":
            self.accountable = True
            self.stock = StockPrecompile("stock-precompile:eager", "eager")

    @property
    def script(self) -> str:
        """There is none: it takes whole steps, and a script has functions and backwards."""
        raise ReproError(f"subject {self.name} has no form in a script\n  try    stock-step:{self.backend}")

    def training_step(self, step: Callable[..., T]) -> Callable[..., T]:
        """The step, served by what its first call has written."""
        cells = (cell.cell_contents for cell in step.__closure__ or ())
        modules = [value for value in cells if isinstance(value, nn.Module)]
        served: list[Callable[..., T]] = []

        def whole(leaves: _Leaves, *given: Any) -> T:
            return step(torch.Tensor.backward, *leaves.among(given[len(modules) :]))

        def call(*args: Any) -> T:
            given = (_Leaves(args), *modules, *(arg for arg in args if not _is_leaf(arg)))
            if served:
                return served[0](*given)
            result, serve = captured(whole, given, self.backend)
            served.append(serve)
            return result

        return call


class _Leaves(nn.Module):
    """The leaves among a step's arguments, as parameters: of other inputs precompile takes no gradients."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.count = len(args)
        self._parameters.update({str(place): arg for place, arg in enumerate(args) if _is_leaf(arg)})

    def among(self, others: Iterable[Any]) -> list[Any]:
        """All arguments, the leaves in their places."""
        rest = iter(others)
        places = map(str, range(self.count))
        return [self._parameters[at] if at in self._parameters else next(rest) for at in places]


def _is_leaf(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.is_leaf and arg.requires_grad


def captured(function: Callable[..., T], args: tuple[Any, ...], backend: str) -> tuple[T, Callable[..., T]]:
    """The result of one call, and what serves further ones: read from the files that the capture wrote, or,
    in torch 2.14, from two values.
    """
    precompile: Any = attrgetter(PRECOMPILE.path)(torch)
    if not hasattr(precompile, "capture"):
        serve = precompile.load(*precompile(function, *args, backend=backend))
        return serve(*args), serve
    with tempfile.TemporaryDirectory(prefix="gradparity-") as folder:
        code, cache = Path(folder) / "step.py", Path(folder) / "step.cache"
        with precompile.capture(function, artifact_path=code, cache_path=cache, backend=backend) as capture:
            result: T = capture(*args)
        return result, precompile.load(code, cache)


MADE: dict[Feature, Callable[[str, str], Subject]] = {
    STEP: StockStep,
    PRECOMPILE: StockPrecompile,
    STRICT: StockStrict,
}
