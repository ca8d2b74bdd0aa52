"""Stock PyTorch's compilers: torch.compile of the forward, and compiled autograd around the backward.

In: a backend's name. Out: subjects "stock-compile:<backend>", "stock-ca:<backend>" and "compile:<backend>".
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from gradparity.subjects.base import Subject

T = TypeVar("T")


FALLBACK_RANDOM = """
def around_program():
    import torch._inductor.config as inductor_config

    return inductor_config.patch(fallback_random=True)
"""
BY_COMPILE = """
def by_subject(target):
    return torch.compile(target, backend={backend!r})
"""
BY_FUNCTION = """
def by_subject(target):
    import {module}

    return torch.compile(target, backend={module}.{function})
"""
BY_FILE = """
def by_subject(target):
    import runpy

    return torch.compile(target, backend=runpy.run_path({module!r})[{function!r}])
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
        self.stage = STAGES.get(backend, backend)
        if backend not in STAGES:
            self.accountable = True
            self.stock = StockCompile("stock-compile:aot_eager", "aot_eager")

    @property
    def file(self) -> Path | None:
        """The file of a backend that is named by its file, or by a module in the working folder."""
        module = self.backend.rpartition(":")[0]
        path = Path(module if module.endswith(".py") else f"{module}.py")
        return path.resolve() if module and path.is_file() else None

    @property
    def script(self) -> str:
        """As a user calls torch.compile."""
        random = "" if self.own_random else FALLBACK_RANDOM
        if ":" not in self.backend:
            return BY_COMPILE.format(backend=self.backend) + "\n" + random
        module, _, function = self.backend.rpartition(":")
        if self.file is not None:  # the script may be started in another folder
            return BY_FILE.format(module=str(self.file), function=function) + "\n" + random
        return BY_FUNCTION.format(module=module, function=function) + "\n" + random

    def compile(self, target: T) -> T:
        """The function or module under torch.compile."""
        compiler: Any = torch.compile
        backend: Any = function_at(self.backend) if ":" in self.backend else self.backend
        compiled: T = compiler(target, backend=backend)
        return compiled


STAGES = {"eager": "dynamo", "aot_eager": "aot_eager"}
"""Backends that generate no code, and the stages that they show: nothing before them could be blamed."""


@functools.cache
def function_at(place: str) -> Callable[..., Any]:
    """The function at ``module:function`` or ``file.py:function``; modules also in the working folder.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, function = place.rpartition(":")
    found: Any = getattr(_loaded(module), function)
    if not callable(found):
        raise AttributeError(f"{function} of {module} is no function, but a {type(found).__name__}")
    made: Callable[..., Any] = found
    return made


def functions_of(module: str) -> list[str]:
    """The callables that a module, or a Python file, defines or assigns at its top, in the file's order; no
    classes, and no names that begin with an underscore. None of a module that is not written in Python.

    Raises:
        ImportError, SyntaxError: there is no such module or file, or it is no Python.
    """
    loaded = _loaded(module)
    file = Path(getattr(loaded, "__file__", None) or "")
    if file.suffix != ".py":
        return []
    names: list[str] = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
        names += [node.name] if isinstance(node, ast.FunctionDef) else []
    found = {name: getattr(loaded, name, None) for name in names if not name.startswith("_")}
    return [name for name, value in found.items() if callable(value) and not isinstance(value, type)]


def _loaded(module: str) -> ModuleType:
    """The module of this name or in this file, imported."""
    path = Path(module).resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return _of_file(path) if path.suffix == ".py" else importlib.import_module(module)


@functools.cache
def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path.name} in {path.parent}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, loaded)
    sys.path.insert(0, str(path.parent))  # its neighbours come first, as in a script
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        if sys.modules[path.stem] is loaded:
            del sys.modules[path.stem]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return loaded


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
