"""One call under eager and under the AOT path, compared bit for bit.

In: a function, and a function that makes its inputs anew. Out: nothing, or a failed assertion that says what
differs: outputs and what autograd says of them, gradients and their layout, inputs after the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import retrograd
from retrograd import aot
from retrograd.aot.run.call import CompiledFunction
from retrograd.graph.joint_graph import Partition

Fn = Callable[..., Any]
#: gives the tensors whose gradients count, and the arguments of the call.
Make = Callable[[], tuple[Sequence[Tensor], Sequence[Any]]]


def tensor(*sizes: int, seed: int = 3, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """Random numbers that depend on sizes and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(dtype).requires_grad_(grad)


def leaf(*sizes: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return tensor(*sizes, seed=seed, dtype=dtype, grad=True)


def captures() -> int:
    """Captures in this test so far."""
    return retrograd.counters["aot_captures"]


@dataclass(frozen=True)
class Outcome:
    """What a call and its backward leave behind; texts and bits, so that two can be compared with ``==``."""

    outputs: list[Any]
    gradients: list[Any]
    inputs: list[Any]


def outcome(fn: Fn, make: Make, is_differentiated: bool = True) -> Outcome:
    """Call `fn` once and differentiate a weighted sum of all outputs."""
    torch.manual_seed(11)
    leaves, args = make()
    results = pytree.tree_leaves(fn(*args))
    outputs = [described(result) for result in results]
    roots = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if roots and is_differentiated:
        torch.autograd.backward(roots, [weights(root) for root in roots])
    return Outcome(outputs, [described(value.grad) for value in leaves], [described(value) for value in args])


def weights(like: Tensor) -> Tensor:
    """Cotangents whose sums show the order in which they were made."""
    return torch.arange(1, like.numel() + 1).sin().reshape(like.shape).to(like.dtype)


def described(value: Any) -> Any:
    """A tensor as dtype, layout, what autograd says of it, and elements; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    tracked = (value.requires_grad, value.is_leaf)
    return str(value.dtype), tuple(value.shape), value.stride(), tracked, value.detach().tolist()


def agree(fn: Fn, make: Make, *, calls: int = 2, is_differentiated: bool = True, **options: Any) -> None:
    """Assert that `fn` under ``aot.function`` does as it does by itself, captured and from the cache."""
    options = {"backend": "eager", "strict": True, **options}
    compiled = aot.function(fn, **options)
    expected = outcome(fn, make, is_differentiated)
    for _ in range(calls):
        assert outcome(compiled, make, is_differentiated) == expected
    assert captures() == 1


def plain(*leaves: Tensor) -> Make:
    """Fresh copies of leaves, which are all of the arguments."""

    def make() -> tuple[list[Tensor], list[Tensor]]:
        copies = [value.detach().clone().requires_grad_(value.requires_grad) for value in leaves]
        return copies, copies

    return make


def captured(fn: Fn, *args: Any, **options: Any) -> aot.JointGraph:
    return aot.capture(aot.create_state(fn, args, **options))


def staged(fn: Fn, *args: Any, policy: Any = "min_cut", **options: Any) -> tuple[Partition, CompiledFunction]:
    """All stages by hand."""
    parts = aot.partition(captured(fn, *args), policy)
    return parts, aot.compile(parts, **{"forward": "eager", **options})
