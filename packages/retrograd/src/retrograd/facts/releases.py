"""Hides the differences between releases of torch; no other module checks for a release.

In: arguments or results in one release's form. Out: the same form for every release. We detect a change by
the features of torch, never by its version number, which the comments only mention.
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

#: The function in which every non-reentrant checkpoint runs. 2.14 added a new one; the old one still exists.
CHECKPOINT = "torch.utils.checkpoint:_checkpoint_without_reentrant_generator" + (
    "_impl" if hasattr(torch_checkpoint, "_checkpoint_without_reentrant_generator_impl") else ""
)


def checkpoint_options(*args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """The ``context_fn`` and ``preserve_rng_state`` in a call of `CHECKPOINT`; keywords since 2.14."""
    by_name = CHECKPOINT.endswith("_impl")
    context_fn, repeats = (kwargs["context_fn"], kwargs["preserve_rng_state"]) if by_name else args[2:0:-1]
    return context_fn, bool(repeats)


def redrawing(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call of `CHECKPOINT` with ``preserve_rng_state`` set."""
    if CHECKPOINT.endswith("_impl"):
        return args, {**kwargs, "preserve_rng_state": True}
    return (args[0], True, *args[2:]), kwargs


def gradients_of(args: Sequence[Any]) -> tuple[list[Any], bool]:
    """The gradients passed to a compiled forward's backward, and whether they came as one list (since
    2.12)."""
    is_list = len(args) == 1 and isinstance(args[0], list)
    return (args[0] if is_list else list(args)), is_list


def wants_gradient(output: Any) -> bool:
    """Whether AOTAutograd's backward takes a gradient for `output`. Since 2.12 a separate flag says so, not
    ``requires_grad``."""
    return bool(getattr(output, "requires_grad_for_backward", output.requires_grad))


def accumulated(rest: Sequence[Any]) -> tuple[Any, bool, bool]:
    """Unpack the engine's ``accumulate_grad(variable, *rest)``: the gradient, whether hooks follow, and
    whether we must return the new ``.grad``. Since 2.13 we must, and the old ``.grad`` comes first."""
    *old, grad, has_post_hooks = rest
    return grad, bool(has_post_hooks), bool(old)


def is_layout_enforced() -> bool:
    """Whether gradients must have their parameter's layout; since 2.13 users can switch this off."""
    asked = getattr(torch._C, "_is_grad_layout_enforcement_enabled", None)
    return True if asked is None else bool(asked())


def unseen(make: Callable[[], T]) -> T:
    """Return ``make()``, unseen by the user's node-creation hooks. torch has these since 2.14, per thread, so
    we then run `make` on a new thread."""
    if not hasattr(torch._C._autograd, "_push_node_creation_hook"):
        return make()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def policy_context(result: Any) -> SelectiveCheckpointContext:
    """The context that a selective-checkpoint policy receives; since 2.12 with the operator's result."""
    return SelectiveCheckpointContext(is_recompute=False, **_known(_CONTEXT, op_output=result))


def frame_limits(optimize: Callable[..., Any], recompile_limit: int) -> dict[str, Any]:
    """Options of Dynamo's `optimize` that count recompilations per callable; available since 2.13."""
    names = inspect.signature(optimize).parameters
    return _known(names, recompile_limit=recompile_limit, isolate_recompiles=True)


def raised_on_fakes(errors: Any) -> tuple[type[Exception], ...]:
    """The errors that Dynamo raises if an operation fails on fake tensors. Since 2.15 user code can catch one
    of them."""
    return errors.TorchRuntimeError, getattr(errors, "FakeTensorObservedException", errors.TorchRuntimeError)


def _known(names: Any, **options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


_CONTEXT = inspect.signature(SelectiveCheckpointContext.__init__).parameters
