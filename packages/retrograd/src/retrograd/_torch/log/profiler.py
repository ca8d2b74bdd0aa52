"""Ranges in torch's profiler, named as eager names them.

In: the name of an autograd node, or any other text. Out: context managers. Whoever makes one asks
`profiling` first: without a profiler there is nothing to pay. Eager's ranges also carry the sequence number
that links a node to its forward operation; torch gives Python no way to set it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def profiling() -> bool:
    """Whether a profiler is active."""
    return torch._C._autograd._profiler_enabled()


def text_range(text: str) -> torch.autograd.profiler.record_function:
    """A range called `text`."""
    return torch.autograd.profiler.record_function(text)


@contextmanager
def node_range(name: str) -> Iterator[None]:
    """The two ranges that eager's engine puts around a node."""
    with text_range(f"autograd::engine::evaluate_function: {name}"), text_range(name):
        yield
