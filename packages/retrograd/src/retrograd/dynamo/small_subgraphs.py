"""Finds pieces of a function between two graph breaks that are too small to compile.

In: a graph from Dynamo, as traced. Out: how many kernels it takes, if it is such a piece.

A graph with one kernel has nothing to fuse. Compiled, it would have guards, an autograd node and a recording
of its own, which take longer than the kernel. Functions that call each other have many such pieces around an
operator that Dynamo leaves to Python: a view before the call, a cast, an addition after it.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX

from retrograd.dynamo.frames import why_ended
from retrograd.errors import Escape
from retrograd.graph.fx import DEPENDS_ON_DATA
from retrograd.graph.operator_effects import Watch
from retrograd.trace import fake_mode_of, mode_among

#: a piece with at most this many kernels is too small
MOST_KERNELS = 1
#: we inspect only graphs with at most this many calls: a kernel, and views around it
_MOST_CALLS = 6


def kernels_of_small_piece(gm: fx.GraphModule, examples: list[Any]) -> int | None:
    """How many kernels `gm` takes, if it is a piece of a function and they are `MOST_KERNELS` or fewer.

    Args:
        gm: a graph from Dynamo.
        examples: its inputs, as fakes and symbolic numbers; they are not changed.
    """
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    if len(calls) > _MOST_CALLS or not _is_piece(gm) or not all(map(_is_of_torch, calls)):
        return None
    given = [value for value in examples if not isinstance(value, (int, torch.SymInt))]
    tensors = [*given, *(node.meta.get("example_value") for node in calls)]
    mode = mode_among(tensors)
    is_fake = all(isinstance(value, torch.Tensor) and fake_mode_of(value) is mode for value in tensors)
    if mode is None or not is_fake:
        return None
    unguarded = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
    kernels: list[Any] = []

    def see(func: Any, *_: Any) -> None:
        """Stop before a call that mutates something, computes a data-dependent size, or is one kernel too
        many."""
        is_query = func.namespace == "prim"  # queries a device or a dtype
        if not is_query and any(one.alias_info is None for one in func._schema.returns):
            kernels.append(func)
        is_more = len(kernels) > MOST_KERNELS
        if is_more or func._schema.is_mutable or not DEPENDS_ON_DATA.isdisjoint(func.tags):
            raise Escape(func)

    try:
        with torch.no_grad(), unguarded, mode, Watch(see):
            gm.forward(*examples)  # global module hooks do not see it
    except Exception:
        return None  # the compilation will report the error
    return len(kernels)


def _is_of_torch(node: fx.Node) -> bool:
    """Whether the call runs no Python code of the user. An ``autograd.Function`` does."""
    if not isinstance(node.target, FunctionType):
        return node.op in ("call_method", "call_function")
    module = node.target.__module__ or ""
    return module.startswith("torch.") and not module.startswith("torch._dynamo")


def _is_piece(gm: fx.GraphModule) -> bool:
    """Whether there is a graph break before or after the code of the graph."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    stack = getattr(reason, "user_stack", None)
    return bool(why_ended(gm)) or bool(stack and stack[0].name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX))
