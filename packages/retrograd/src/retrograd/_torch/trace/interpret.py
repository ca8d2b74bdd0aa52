"""Run a graph that Dynamo made, so that what its nodes know goes on to what they are traced to.

In: a graph module and its inputs. Out: its outputs. Checkpointed parts are run once; what was to be
recomputed carries ``meta["recompute"]``, for the partition to decide by.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, _CachingTorchDispatchMode

from retrograd._torch.releases import policy_context
from retrograd._torch.trace.graph_tracer import noted
from retrograd.errors import Refusal

_checkpoints = itertools.count()


#: what functionalisation takes for no effect at all.
_RESIZE = torch.ops.inductor.resize_storage_bytes_
_REFUSED = (_RESIZE, _RESIZE.default)
#: the last of the calls to which Dynamo lowers an assignment to ``.data``; the call for reading it.
_DATA_WRITTEN, _DATA_READ = "_lower_version_count_by_1", "_get_data_attr"


def run_graph(gm: fx.GraphModule, args: Sequence[Any]) -> Any:
    """Run `gm`; while it is traced, stack traces, module paths and checkpoint policies go on to the trace."""
    return gm(*args) if get_proxy_mode() is None else _Interpreter(gm).run(*args)


#: what calls of the trace are to know of the call that they come from.
_HANDED_ON = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "recompute", "ac_graph_id")


class _Interpreter(fx.Interpreter):
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
        with _Tagging(_policy_of(body), next(_checkpoints)):
            return _Interpreter(body).run(*inputs)


Policy = Callable[..., Any]


def _policy_of(body: fx.GraphModule) -> Policy:
    """What of a checkpointed part is to be recomputed: all, or what the user's policy says."""
    contexts = body.meta.get("_checkpoint_context_fn")
    if contexts is None:
        return lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE
    forward, _ = contexts()
    if not isinstance(forward, _CachingTorchDispatchMode):
        raise Refusal(
            "not-representable", "a checkpoint has a context_fn that is no selective-checkpoint policy"
        )
    policy: Policy = forward.policy_fn
    return policy


class _Tagging(TorchDispatchMode):
    """Writes a policy's answers into the nodes that are made inside."""

    def __init__(self, policy: Policy, number: int) -> None:
        super().__init__()
        self._policy, self._number = policy, number

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        with _new_nodes() as made:
            result = func(*args, **kwargs)
        policy = self._policy(policy_context(result), func, *args, **kwargs)
        if isinstance(policy, bool):
            policy = CheckpointPolicy.MUST_SAVE if policy else CheckpointPolicy.PREFER_RECOMPUTE
        for node in made:
            if "recompute" not in node.meta:  # the innermost checkpoint decides
                node.meta["recompute"], node.meta["ac_graph_id"] = policy, self._number
        return result


@contextmanager
def _new_nodes() -> Iterator[list[fx.Node]]:
    """The calls that are traced inside; complete on leaving."""
    mode = get_proxy_mode()
    graph: Any = mode.tracer.graph if mode is not None else fx.Graph()
    before, made = len(graph.nodes), list[fx.Node]()
    yield made
    nodes = itertools.islice(reversed(graph.nodes), len(graph.nodes) - before)
    made += [node for node in nodes if node.op == "call_function"]
