"""Guards that decide whether a lowered segment can be reused for new inputs.

In: the values it was lowered with, and which sizes were symbolic. Out: `InputGuard.check`. Torch's C++
``TensorGuards`` check tensor metadata; the shape environment checks relations between symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from retrograd.errors import Refusal
from retrograd.graph.structure import is_same


class InputGuard:
    """The guards of one lowering.

    Args:
        args: the values it was lowered with.
        fed: positions of the traced inputs.
        example_inputs: fakes of the traced inputs. A dimension that is symbolic in a fake may differ.
        shape_env: holds the relations that tracing relied on; None if every size is static.
        offsets: whether to guard each tensor's storage offset.

    Attributes:
        args_metadata: the sizes of each value; None for a value without sizes.
        is_static: whether every size is static.
    """

    def __init__(
        self,
        args: Sequence[Any],
        fed: Sequence[int],
        example_inputs: Sequence[Any],
        shape_env: ShapeEnv | None,
        offsets: bool = False,
    ) -> None:
        symbolic = {i: _symbolic_dims(fake) for i, fake in zip(fed, example_inputs, strict=True)}
        first = {
            id(value): i for i, value in reversed(list(enumerate(args))) if isinstance(value, torch.Tensor)
        }
        self._tensors = sorted(first.values())
        self._same = [(i, first[id(v)]) for i, v in enumerate(args) if first.get(id(v), i) != i]
        self._constants = [
            (i, value)
            for i, value in enumerate(args)
            if not isinstance(value, torch.Tensor) and not (type(value) in (int, float) and symbolic.get(i))
        ]
        self._are_all_tensors = len(self._tensors) == len(args)
        unique = [args[i] for i in self._tensors]
        sizes = [
            [None if d in symbolic.get(i, ()) else size for d, size in enumerate(args[i].shape)]
            for i in self._tensors
        ]
        # The shape environment guards only strides that were symbolic in the trace.
        fakes = dict(zip(fed, example_inputs, strict=True))
        laid_out = [fakes.get(i, args[i]).stride() for i in self._tensors]
        strides = [[None if _is_open(stride) else int(stride) for stride in one] for one in laid_out]
        self._guards = TensorGuards(
            *unique,
            dynamic_dims_sizes=sizes,  # type: ignore[arg-type]
            dynamic_dims_strides=strides,  # type: ignore[arg-type]
        )
        self._shape_env, self._fed, self.is_static = shape_env, tuple(fed), shape_env is None
        self._offsets = [(i, args[i].storage_offset()) for i in self._tensors] if offsets else []
        read = _read_values(shape_env, example_inputs) if shape_env else []
        self._read = [fed[number] for number, _ in read]
        known = [*example_inputs, *(size for _, size in read)]
        self._relations = shape_env.produce_guards_expression(known) if shape_env else None
        self.args_metadata = tuple(map(_sizes, args))
        try:
            self._relations_hold(args)
        except Exception as error:  # it uses a size that the graph reads out of a tensor's elements
            raise Refusal("not-guardable", f"no guard can speak of {self._relations}: {error}") from error

    def check(self, args: Sequence[Any]) -> bool:
        """True if the lowered code can run on these values."""
        return (
            (not self._same or all(args[i] is args[j] for i, j in self._same))
            and (not self._constants or all(is_same(value, args[i]) for i, value in self._constants))
            and self._guards.check(*(args if self._are_all_tensors else [args[i] for i in self._tensors]))
            and (not self._offsets or all(args[i].storage_offset() == begin for i, begin in self._offsets))
            and (self._relations is None or self._relations_hold(args))
        )

    def why_not(self, args: Sequence[Any]) -> str:
        """Which guard failed, with the two values that differ."""
        for i, value in self._constants:
            if not is_same(value, args[i]):
                return f"argument {i} was {_describe(value)}, now {_describe(args[i])}"
        for i in self._tensors:
            if not isinstance(args[i], torch.Tensor):
                return f"argument {i} was a tensor, now {_describe(args[i])}"
        names = [f"argument {i}" for i in self._tensors]
        verbose = self._guards.check_verbose(*[args[i] for i in self._tensors], tensor_check_names=names)
        if isinstance(verbose, str):
            return verbose
        for i, offset in self._offsets:
            if args[i].storage_offset() != offset:
                return f"argument {i} began at {offset} in its memory, now at {args[i].storage_offset()}"
        if not self._relations_hold(args):
            before, now = (
                str([sizes for sizes in all_ if sizes]) for all_ in (self.args_metadata, map(_sizes, args))
            )
            return f"relation between sizes {self._relations}: sizes were {before}, now {now}"
        return "aliasing: two arguments were the same tensor, or now are"

    def _relations_hold(self, args: Sequence[Any]) -> bool:
        if self._relations is None or self._shape_env is None:
            return True
        values = [*(args[i] for i in self._fed), *(args[i].item() for i in self._read)]
        return bool(self._shape_env.evaluate_guards_expression(self._relations, values))

    def __str__(self) -> str:
        tensors = f"{len(self._tensors)} tensors: type, dtype, device, sizes, strides, requires_grad"
        return tensors + (f"; {self._relations}" if self._relations else "")


def changed_sizes(before: Sequence[Any], args: Sequence[Any]) -> dict[int, frozenset[int]]:
    """For each argument whose sizes changed, the dimensions that changed (dimension 0 of an int is its
    value)."""
    changed: dict[int, frozenset[int]] = {}
    for i, (old, new) in enumerate(zip(before, map(_sizes, args), strict=True)):
        if old is not None and new is not None and len(old) == len(new) and old != new:
            changed[i] = frozenset(d for d, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    return changed


def _read_values(shape_env: ShapeEnv, fakes: Sequence[Any]) -> list[tuple[int, Any]]:
    """The tensors from which tracing read a size (``start.item()``) that a guard uses, each with that
    size."""
    used = {symbol for guard in shape_env.guards for symbol in guard.expr.free_symbols}
    memos = [(number, getattr(fake, "item_memo", None)) for number, fake in enumerate(fakes)]
    return [
        (number, memo)
        for number, memo in memos
        if isinstance(memo, torch.SymInt) and memo.node.expr.free_symbols & used
    ]


def _symbolic_dims(fake: Any) -> frozenset[int]:
    if isinstance(fake, (torch.SymInt, torch.SymFloat)):
        return frozenset({0})
    return frozenset(dim for dim, size in enumerate(fake.shape) if _is_open(size))


def _is_open(size: Any) -> bool:
    """True if a size is symbolic and tracing has not specialised it to one value."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return (value,) if type(value) is int else None


def _describe(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
