"""Numbers in a trace: those that come in, those that are read from tensors, and nobody may print.

In: a fake mode. Out: symbolic numbers of it; a block in which a symbolic number has no text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic

from retrograd._torch.stand_ins import StepRefusedError

__all__ = ["symbolic_float", "texts_refused"]


def symbolic_float(mode: FakeTensorMode, value: float, name: str) -> Any:
    """A number that is `value` now; what the trace relies on becomes a guard."""
    assert mode.shape_env is not None
    source = ConstantSource(name)
    symbol = mode.shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return mode.shape_env.create_symfloatnode(symbol, hint=value, source=source)


@contextmanager
def texts_refused() -> Iterator[None]:
    """On this thread, ``str`` and the like of a symbolic number raise: its text would be a formula."""
    thread = threading.get_ident()
    with _texts_of(torch.SymFloat, thread), _texts_of(torch.SymInt, thread), _texts_of(torch.SymBool, thread):
        yield


@contextmanager
def _texts_of(cls: Any, thread: int) -> Iterator[None]:
    names = [name for name in ("__str__", "__repr__", "__format__") if name in vars(cls)]
    before = {name: vars(cls)[name] for name in names}

    def refusing(original: Any) -> Any:
        def text(number: Any, *args: Any) -> str:
            if threading.get_ident() == thread:
                raise StepRefusedError("reads-values", "makes a text of a number that it reads from a tensor")
            return original(number, *args)

        return text

    for name, original in before.items():
        setattr(cls, name, refusing(original))
    cls.__format__ = refusing(cls.__format__)
    try:
        yield
    finally:
        if "__format__" not in before:
            del cls.__format__
        for name, original in before.items():
            setattr(cls, name, original)
