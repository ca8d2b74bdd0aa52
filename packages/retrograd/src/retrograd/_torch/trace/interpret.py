"""Run a graph that Dynamo made, so that what its nodes know goes on to what they are traced to.

In: a graph module and its inputs. Out: its outputs. Checkpointed parts are run once, and marked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.trace.checkpointing import Marking
from retrograd._torch.trace.graph_tracer import noted
from retrograd.errors import Refusal

#: what functionalisation takes for no effect at all.
_RESIZE = torch.ops.inductor.resize_storage_bytes_
_REFUSED = (_RESIZE, _RESIZE.default)
#: the last of the calls to which Dynamo lowers an assignment to ``.data``; the call for reading it.
_DATA_WRITTEN, _DATA_READ = "_lower_version_count_by_1", "_get_data_attr"
#: what calls of the trace are to know of the call that they come from.
_HANDED_ON = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "recompute", "ac_graph_id")


def run_graph(gm: fx.GraphModule, args: Sequence[Any]) -> Any:
    """Run `gm`; while it is traced, stack traces, module paths and checkpoint policies go on to the trace."""
    return gm(*args) if get_proxy_mode() is None else _Interpreter(gm, itertools.count()).run(*args)


class _Interpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, checkpoints: Iterator[int]) -> None:
        super().__init__(gm)
        self._checkpoints = checkpoints

    def run_node(self, n: fx.Node) -> Any:
        with noted(**{key: n.meta[key] for key in _HANDED_ON if key in n.meta}):
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _REFUSED:
            raise Refusal("not-representable", f"it calls {target}")
        if getattr(target, "__name__", "") == _DATA_WRITTEN:
            raise Refusal("not-representable", "it assigns to .data of a tensor")
        if getattr(target, "__name__", "") == _DATA_READ:
            return args[0].data  # seen by those who watch for it
        if target is not tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        body, *inputs = args
        contexts = body.meta.get("_checkpoint_context_fn")
        with Marking(contexts, CheckpointPolicy.PREFER_RECOMPUTE, next(self._checkpoints)):
            return _Interpreter(body, self._checkpoints).run(*inputs)
