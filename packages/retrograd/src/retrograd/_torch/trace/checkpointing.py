"""Checkpoints inside a traced function.

In: a trace. Out: while it runs, a checkpoint runs its function once and marks what that computes to be
computed again in the backward (``meta["recompute"]``), instead of hooking the tensors that it saves or
differentiating a second run. The partition does the rest, with the same random numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    noop_context_fn,
)

from retrograd._torch.patches import handled_here
from retrograd._torch.releases import CHECKPOINT, checkpoint_contexts, policy_context
from retrograd._torch.trace.graph_tracer import noted_here
from retrograd.errors import Refusal


@contextmanager
def checkpoints_marked() -> Iterator[None]:
    """Checkpoints that run inside, on this thread, only mark."""
    groups = itertools.count(1)

    def without_reentry(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        contexts = checkpoint_contexts(*args, **kwargs)
        with Marking(contexts, CheckpointPolicy.MUST_RECOMPUTE, next(groups)):
            yield

    def reentrant(original: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """In place of ``CheckpointFunction.apply``: gradients only if an argument requires grad."""
        wanted = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        marking = Marking(None, CheckpointPolicy.MUST_RECOMPUTE, next(groups))
        with torch.set_grad_enabled(wanted), marking:
            return function(*args)

    with (
        handled_here(CHECKPOINT, without_reentry),
        handled_here("torch.utils.checkpoint:CheckpointFunction.apply", reentrant),
    ):
        yield


class Marking(TorchDispatchMode):
    """Writes into the calls that are traced inside what a checkpoint says about saving them.

    Args:
        contexts: the checkpoint's ``context_fn``, of ``create_selective_checkpoint_contexts``.
        otherwise: what is said of every call where there is none.
        group: number of the checkpoint.

    Raises:
        Refusal: a ``context_fn`` of another kind.
    """

    def __init__(
        self, contexts: Callable[[], tuple[Any, Any]] | None, otherwise: CheckpointPolicy, group: int
    ) -> None:
        super().__init__()
        self._group = group
        self._policy: Callable[..., Any] = lambda *args, **kwargs: otherwise
        if contexts is not None and contexts is not noop_context_fn:
            forward, _ = contexts()
            if not isinstance(forward, _CachingTorchDispatchMode):
                raise Refusal(
                    "not-representable",
                    "a checkpoint has a context_fn that is no selective-checkpoint policy",
                )
            self._policy = forward.policy_fn

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
        if "recompute" not in noted_here():  # a mark that the graph had already
            for node in made:  # of nested checkpoints, the innermost comes last
                node.meta["recompute"], node.meta["ac_graph_id"] = policy, self._group
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
