"""Eight more faults of a vendor's backend, written before anything was measured and tuned for none of them.

In: nothing. Out: `FAULTS`: by name, a backend for `torch.compile`, as in `vendor_faults`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unit.gradparity.fuzzing.vendor import Backend, aot, around, kernels

aten = torch.ops.aten
Tensor = torch.Tensor
Call = Callable[..., Any]
VECTOR = 16


def _without_tail(op: Call, *args: Any, **kwargs: Any) -> Tensor:
    """What does not fill a vector is not written, if at least one vector is full."""
    found = op(*args, **kwargs)
    if found.numel() <= VECTOR or not found.numel() % VECTOR:
        return found
    written = torch.arange(found.numel()).reshape(found.shape) < found.numel() // VECTOR * VECTOR
    return torch.where(written, found, torch.zeros_like(found))


def _biased(
    op: Call, x: Tensor, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """The running variance is that of the batch, without n / (n - 1)."""
    *found, new = op(x, w, b, mean, var, training, momentum, eps)
    count = x.numel() / x.shape[1]
    return *found, var * (1 - momentum) + (new - var * (1 - momentum)) * (count - 1) / count


def _as_contiguous(compiled: Call, args: list[Any]) -> Any:
    """An argument is read as if it had no gaps and were not turned."""
    return compiled(*map(_read, args))


def _read(one: Any) -> Any:
    if not isinstance(one, Tensor) or one.is_contiguous() or type(one) is not Tensor:
        return one
    room = one.untyped_storage().nbytes() // one.element_size() - one.storage_offset()
    if room < one.numel():
        return one
    return one.as_strided(one.shape, torch.empty(one.shape, device="meta").stride(), one.storage_offset())


def _one_seed(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
    """Each call draws the random numbers of the first one."""
    compiled, states = aot()(gm, inputs), list[Tensor]()

    def run(*args: Any) -> Any:
        if states:
            torch.set_rng_state(states[0])
        states.append(torch.get_rng_state())
        return compiled(*args)

    return run


def _pooled(op: Call, grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """Where windows overlap, one writes over the other."""
    places = args[-1]
    zeros = torch.zeros_like(x).flatten(-2)
    return zeros.scatter(-1, places.flatten(-2), grad.flatten(-2)).view_as(x)


def _nothing_added(op: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A sum of no elements is whatever the memory held."""
    found = op(x, *args, **kwargs)
    return torch.ones_like(found) if x.numel() == 0 else found


FAULTS: dict[str, Backend] = {
    "vector_tail": kernels({aten.mul: _without_tail}),
    "biased_running_variance": kernels({aten._native_batch_norm_legit_functional: _biased}),
    "c_remainder": kernels({aten.remainder: lambda op, x, y: torch.fmod(x, y)}),
    "gaps_ignored": around(_as_contiguous),
    "one_seed": _one_seed,
    "pooled_overlaps": kernels({}, {aten.max_pool2d_with_indices_backward: _pooled}),
    "empty_sum": kernels({aten.sum: _nothing_added}),
    "conjugate_lost": kernels({}, {aten._conj: lambda op, x: x, aten.conj_physical: lambda op, x: x}),
}
"""By name."""
globals().update(FAULTS)
