"""Inductor, called below AOTAutograd: an ATen graph in, a boxed callable out.

Inductor itself is imported when it is used: that takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing

__all__ = ["compile_graph", "decompositions", "patched", "settings"]


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions that Inductor expects to have been applied."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def settings() -> list[str]:
    """The names of Inductor's settings."""
    from torch._inductor import list_options

    return list_options()


def patched(values: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inside, Inductor's settings have these `values`."""
    if not values:
        return nullcontext()
    from torch._inductor import config

    return config.patch(dict(values))


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile `gm` (functional, decomposed, returning a tuple) for inputs like the fake `example_inputs`."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    fake_mode = detect_fake_mode(example_inputs)
    with torch.no_grad(), tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
        joint_graph_passes(gm)
        compiled = compile_fx_inner(gm, list(example_inputs))
    if getattr(compiled, "_boxed_call", False):
        return compiled
    return lambda args: compiled(*args)
