"""Checkpoints inside a traced function.

In: a trace. Out: while it runs, ``torch.utils.checkpoint`` runs its function once and marks what that
computes to be computed again in the backward, instead of hooking the tensors that it saves or differentiating
a second run. The partition does the rest, with the same random numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from retrograd._torch.patches import handled_here
from retrograd._torch.releases import CHECKPOINT, checkpoint_contexts


class _Marks(Protocol):
    def marking(self, policy: Callable[..., Any], group: int) -> Any:
        """A context in which calls are marked by a policy."""


@contextmanager
def checkpoints_marked(tracer: _Marks) -> Iterator[None]:
    """Checkpoints that run inside, on this thread, only mark."""
    groups = itertools.count(1)

    def without_reentry(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        return _marked(tracer, _policy(checkpoint_contexts(*args, **kwargs)), next(groups))

    def reentrant(original: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """In place of ``CheckpointFunction.apply``: gradients only if an argument requires grad."""
        wanted = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(wanted), tracer.marking(_always, next(groups)):
            return function(*args)

    with (
        handled_here(CHECKPOINT, without_reentry),
        handled_here("torch.utils.checkpoint:CheckpointFunction.apply", reentrant),
    ):
        yield


def _marked(tracer: _Marks, policy: Callable[..., Any], group: int) -> Iterator[None]:
    with tracer.marking(policy, group):
        yield


def _always(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _policy(context_fn: Callable[[], tuple[Any, Any]] | None) -> Callable[..., CheckpointPolicy]:
    """The policy of ``create_selective_checkpoint_contexts``; without one, everything is computed again."""
    if context_fn is None or context_fn is torch_checkpoint.noop_context_fn:
        return _always
    policy = getattr(context_fn()[0], "policy_fn", None)
    if policy is None:
        raise NotImplementedError("a checkpoint with a context of its own")

    def marked(target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not isinstance(target, torch._ops.OpOverload):
            return CheckpointPolicy.PREFER_RECOMPUTE
        found: CheckpointPolicy | bool = policy(
            SelectiveCheckpointContext(is_recompute=False), target, *args, **kwargs
        )
        if isinstance(found, bool):
            return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE
        return found

    return marked
