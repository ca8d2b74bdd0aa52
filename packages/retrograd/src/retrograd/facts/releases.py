"""What differs between the releases of torch, each change by its name; nothing else asks which torch it is.

In: what one release wants or gives. Out: the same for every release. A change is seen by what is there, never
by the number of the release, which is only told.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import SelectiveCheckpointContext

T = TypeVar("T")

#: what every checkpoint without reentry runs in: since 2.14 another function, beside which the old one stays.
CHECKPOINT = "torch.utils.checkpoint:_checkpoint_without_reentrant_generator" + (
    "_impl" if hasattr(torch_checkpoint, "_checkpoint_without_reentrant_generator_impl") else ""
)


def checkpoint_options(*args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """The ``context_fn`` and ``preserve_rng_state`` in a call of `CHECKPOINT`: since 2.14 by their names."""
    by_name = CHECKPOINT.endswith("_impl")
    context_fn, repeats = (kwargs["context_fn"], kwargs["preserve_rng_state"]) if by_name else args[2:0:-1]
    return context_fn, bool(repeats)


def redrawing(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call of `CHECKPOINT`, with ``preserve_rng_state``."""
    if CHECKPOINT.endswith("_impl"):
        return args, {**kwargs, "preserve_rng_state": True}
    return (args[0], True, *args[2:]), kwargs


def gradients_of(args: Sequence[Any]) -> tuple[list[Any], bool]:
    """The gradients that a compiled forward's backward was called with; whether as one list: since 2.12."""
    is_list = len(args) == 1 and isinstance(args[0], list)
    return (args[0] if is_list else list(args)), is_list


def wants_gradient(output: Any) -> bool:
    """Whether AOTAutograd's backward takes a gradient for `output`: since 2.12 it says so besides
    ``requires_grad``."""
    return bool(getattr(output, "requires_grad_for_backward", output.requires_grad))


def accumulated(rest: Sequence[Any]) -> tuple[Any, bool, bool]:
    """Of the engine's ``accumulate_grad(variable, *rest)`` the gradient, whether hooks follow, whether the
    new ``.grad`` is to be returned: since 2.13, where the old one is given first."""
    *old, grad, has_post_hooks = rest
    return grad, bool(has_post_hooks), bool(old)


def is_layout_enforced() -> bool:
    """Whether gradients must have their parameter's layout; since 2.13 that may be switched off."""
    asked = getattr(torch._C, "_is_grad_layout_enforcement_enabled", None)
    return True if asked is None else bool(asked())


def unseen(make: Callable[[], T]) -> T:
    """What `make` makes; where torch has hooks on the making of nodes, of one thread each (since 2.14), on a
    thread of its own."""
    if not hasattr(torch._C._autograd, "_push_node_creation_hook"):
        return make()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def policy_context(result: Any) -> SelectiveCheckpointContext:
    """What policies of selective checkpoints are told: since 2.12 also the operator's result."""
    return SelectiveCheckpointContext(is_recompute=False, **_known(_CONTEXT, op_output=result))


def frame_limits(optimize: Callable[..., Any], recompile_limit: int) -> dict[str, Any]:
    """The options of Dynamo's `optimize` that count recompilations for each callable: there since 2.13."""
    names = inspect.signature(optimize).parameters
    return _known(names, recompile_limit=recompile_limit, isolate_recompiles=True)


def raised_on_fakes(errors: Any) -> tuple[type[Exception], ...]:
    """What Dynamo raises where an operation fails on fake tensors: since 2.15 what ``try`` can catch, too."""
    return errors.TorchRuntimeError, getattr(errors, "FakeTensorObservedException", errors.TorchRuntimeError)


def _known(names: Any, **options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


_CONTEXT = inspect.signature(SelectiveCheckpointContext.__init__).parameters
