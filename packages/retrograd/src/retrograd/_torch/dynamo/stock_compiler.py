"""Stock compiled autograd beside ours: is it on, and how to keep it off while ours runs.

In: torch's process-wide compiler pointer. Out: the compiler that stock has installed, as a value to compare;
each time that stock is switched on it is another one. Ours is never seen here: it is installed only while a
capture window is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._dynamo import compiled_autograd as engine_protocol
from torch._dynamo import compiled_autograd as stock

from retrograd._torch.autograd import window


def installed_compiler() -> Any | None:
    """The stock compiler that is on; None if stock compiled autograd is off."""
    if not stock.compiled_autograd_enabled:
        return None
    with window.stock():  # no capture of ours is under way on another thread
        compiler, dynamic = engine_protocol.set_autograd_compiler(None, False)
        engine_protocol.set_autograd_compiler(compiler, dynamic)
    return compiler


@contextmanager
def stock_compiler_off() -> Iterator[None]:
    """Switch stock compiled autograd off, and on again at the end."""
    compiler, dynamic = engine_protocol.set_autograd_compiler(None, False)
    stock.compiled_autograd_enabled = False
    try:
        yield
    finally:
        stock.compiled_autograd_enabled = True
        engine_protocol.set_autograd_compiler(compiler, dynamic)
