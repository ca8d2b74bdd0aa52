"""Which autograd node does an ATen node come from?

In: the node of a captured graph that is being traced, with the name and source line of its autograd node.
Out: ATen nodes whose ``meta["custom"]`` has both and whose ``stack_trace`` is the source line, so that
``print_readable`` shows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import fx
from torch.fx import traceback as fx_traceback

__all__ = ["noted", "noting"]

_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)  (?P<code>.*)")


def noting() -> AbstractContextManager[Any]:
    """Around a trace in which `noted` is used."""
    return fx_traceback.preserve_node_meta()


@contextmanager
def noted(node: fx.Node, name: str, source: str) -> Iterator[None]:
    """What is traced inside comes from the autograd node `name` (``MulBackward0 (7 of 31)``), made by the
    user's line `source` (``model.py:88  y = x * w``, or empty)."""
    node.meta["custom"] = {"autograd_node": name}
    if found := _LINE.fullmatch(source):
        node.meta["stack_trace"] = (
            f'  File "{found["file"]}", line {found["line"]}, in forward\n    {found["code"]}\n'
        )
    with fx_traceback.set_current_meta(node):
        yield
