"""Twenty-five faults of a vendor's backend, which `gradparity fuzz` must meet within a minute.

In: nothing. Out: `FAULTS`: by name, a backend for `torch.compile`. `right` has no fault. Each is a mistake
that code generators and memory planners really make. To see one:
`gradparity fuzz --subject vendor_faults.py:mask_redrawn --minutes 1`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func

from unit.gradparity.fuzzing.vendor import (
    Backend,
    aot,
    around,
    kernels,
    on_gradients,
    storage,
    tensors_of,
)

aten = torch.ops.aten
Tensor = torch.Tensor
Call = Callable[..., Any]
HALVES = (torch.float16, torch.bfloat16)
right = aot()

# Values: kernels that compute something else.


def _ten_bits(op: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Rounds what goes into a matrix product, as tensor cores do."""
    return op(*map(_rounded, args), **kwargs)


def _rounded(one: Any) -> Any:
    if not isinstance(one, Tensor) or one.dtype is not torch.float32:
        return one
    return (one.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _added_in_half(op: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Adds half-precision numbers one by one, each sum rounded."""
    if x.dtype not in HALVES or not x.ndim:
        return op(x, *args, **kwargs)
    dims = [dim % x.ndim for dim in (args[0] if args and args[0] else range(x.ndim))]
    rest = [dim for dim in range(x.ndim) if dim not in dims]
    rows = x.permute(*dims, *rest).reshape(-1, *(x.shape[dim] for dim in rest))
    total = torch.zeros_like(rows[0]) if len(rows) else rows.sum(0)
    for row in rows:
        total = total + row
    return total.reshape(op(x, *args, **kwargs).shape)


def _norm_in_half(op: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Squares half-precision numbers without a wider type: 257 overflows."""
    if x.dtype is not torch.float16 or (args and args[0] != 2):
        return op(x, *args, **kwargs)
    dims = args[1] if len(args) > 1 else None
    keep = args[2] if len(args) > 2 else False
    squares = x * x
    return (squares.sum() if dims is None else squares.sum(dims, keep)).sqrt()


def _layer_norm_in_half(op: Call, x: Tensor, *args: Any) -> Any:
    """The same inside a layer norm."""
    if x.dtype is torch.float16 and bool(torch.isinf(x * x).any()):
        return tuple(one * torch.nan for one in op(x, *args))
    return op(x, *args)


def _last_of_equals(op: Call, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of several largest numbers, the place of the last."""
    if not args or not isinstance(args[0], int):
        return op(x, *args, **kwargs)
    dim, *args = args
    values, places = op(x.flip(dim), dim, *args, **kwargs)
    return values, x.shape[dim] - 1 - places


def _last_place(op: Call, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None:
        return x.numel() - 1 - op(x.reshape(-1).flip(0))
    return x.shape[dim] - 1 - op(x.flip(dim), dim, keepdim)


def _first_of_many(op: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The gradient of a broadcast value: one of its copies, not their sum."""
    if not args or not args[0]:
        return op(x, *args, **kwargs)
    for dim in args[0]:
        x = x.narrow(dim, 0, min(1, x.shape[dim]))
    return op(x, *args, **kwargs)


def _index_add(op: Call, x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any = 1) -> Tensor:
    """Of several numbers for one place, the last; likewise below."""
    return x.index_copy(dim, index, x.index_select(dim, index) + alpha * source)


def _scatter_add(op: Call, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    part = source[tuple(slice(length) for length in index.shape)]
    return x.scatter(dim, index, x.gather(dim, index) + part)


def _index_put(op: Call, x: Tensor, places: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    return op(x, places, aten.index(x, places) + values if accumulate else values)


# Memory: results and saved tensors in the wrong place.


def _contiguous_outputs(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
    return make_boxed_func(
        lambda *args: [one.contiguous() if isinstance(one, Tensor) else one for one in gm(*args)]
    )


def _copied(compiled: Call, args: list[Any]) -> Any:
    """Results that lie in the memory of an argument are new tensors."""
    owned = {storage(one) for one in tensors_of(args)}
    found = compiled(*args)
    return type(found)(
        one.clone() if isinstance(one, Tensor) and storage(one) in owned else one for one in found
    )


def _unversioned(compiled: Call, args: list[Any]) -> Any:
    """Whoever saved an argument does not learn that it was changed."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(tensors_of(args))):
        return compiled(*args)


def _with_saved_as_scratch(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
    """The backward's planner takes the memory of saved tensors for its own: a second backward reads that."""
    own: set[int] = set()

    def forward(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
        def run(*args: Any) -> Any:
            found = gm(*args)
            used = Counter(map(storage, tensors_of([*args, *found])))
            own.update(where for where, times in used.items() if times == 1)
            return found

        return make_boxed_func(run)

    def backward(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]

        def run(*args: Any) -> Any:
            found = [one.clone() if tensors_of([one]) and storage(one) in own else one for one in gm(*args)]
            for name, one in zip(names, args, strict=True):
                if not name.startswith(("primals", "tangents")) and tensors_of([one]) and storage(one) in own:
                    one.zero_()
            return found

        return make_boxed_func(run)

    return aot(forward, backward)(gm, inputs)


def _into_one_buffer(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
    """Gradients lie in the same memory in each backward, as in a replayed CUDA graph."""
    buffers: list[Any] = []

    def run(*args: Any) -> Any:
        found = [one.clone() if isinstance(one, Tensor) else one for one in gm(*args)]
        if not buffers:
            buffers.extend(found)
        for buffer, one in zip(buffers, found, strict=True):
            if one is not buffer and isinstance(one, Tensor):
                buffer.copy_(one)
        return [one if one is None else one.view_as(one) for one in buffers]

    return make_boxed_func(run)


# Hooks of the arguments, which this backend takes over into tensors of its own.


def _without_hooks(compiled: Call, args: list[Any]) -> Any:
    for one in tensors_of(args):
        one._backward_hooks = None
    return compiled(*args)


def _hooks_twice(compiled: Call, args: list[Any]) -> Any:
    for one in tensors_of(args):
        for hook in list((one._backward_hooks or {}).values()):
            one.register_hook(hook)
    return compiled(*args)


def _hooks_reversed(compiled: Call, args: list[Any]) -> Any:
    for one in tensors_of(args):
        hooks = one._backward_hooks or {}
        for key, hook in reversed(list(hooks.items())):
            del hooks[key]
            hooks[key] = hook
    return compiled(*args)


# Later calls: what is left of the first one.


def _frozen_buffers(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
    """Buffers are folded into the code as constants."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    compiled, frozen = right(gm, inputs), dict[int, Any]()

    def run(*args: Any) -> Any:
        given = list(args)
        for place, one in enumerate(args):
            if "buffers" in names[place] and isinstance(one, Tensor):
                given[place] = frozen.setdefault(place, one.clone())
        return compiled(*given)

    return run


def _cached(change: Callable[[Tensor, Tensor], Tensor]) -> Backend:
    """A backend that finds its code by the operators alone, and with it the results of the first call."""
    first: dict[str, list[Tensor]] = {}

    def compile(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
        compiled = right(gm, inputs)
        key = str([node.target for node in gm.graph.nodes if node.op.startswith("call")])

        def run(*args: Any) -> Any:
            found = compiled(*args)
            before = first.setdefault(key, [one.detach().to("meta") for one in tensors_of(found)])
            old = iter(before)
            return type(found)(change(one, next(old)) if isinstance(one, Tensor) else one for one in found)

        return run

    return compile


def _as_long(new: Tensor, old: Tensor) -> Tensor:
    """Only as many elements as the first call had are written."""
    if new.numel() <= old.numel():
        return new
    written = torch.arange(new.numel()).reshape(new.shape) < old.numel()
    return new * written.to(new.dtype)


def _redrawn(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
    """What a random operator gave is drawn again in the backward."""
    drawn: set[str] = set()

    def forward(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
        for node in gm.graph.nodes:
            is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            read = {one.name for one in node.all_input_nodes}
            if is_random or (len(read) == 1 and read <= drawn):
                drawn.add(node.name)
        return make_boxed_func(gm.forward)

    def backward(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]

        def run(*args: Any) -> Any:
            return gm(
                *(_turned(one) if name in drawn else one for name, one in zip(names, args, strict=True))
            )

        return make_boxed_func(run)

    return aot(forward, backward)(gm, inputs)


def _turned(one: Any) -> Any:
    return one.reshape(-1).roll(1).reshape(one.shape) if isinstance(one, Tensor) else one


def _zeros_for_none(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
    """An argument without a gradient gets one of zeros."""
    seen: list[Any] = []

    def forward(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
        def run(*args: Any) -> Any:
            seen[:] = args
            return gm(*args)

        return make_boxed_func(run)

    def backward(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
        def run(*args: Any) -> Any:
            return [
                torch.zeros_like(old) if one is None and isinstance(old, Tensor) else one
                for one, old in zip(gm(*args), seen, strict=False)
            ]

        return make_boxed_func(run)

    return aot(forward, backward)(gm, inputs)


def _larger(op: Call, *args: Any, **kwargs: Any) -> Tensor:
    return op(*args, **kwargs) * 1.01


DUPLICATES = {aten.index_add: _index_add, aten.scatter_add: _scatter_add, aten.index_put: _index_put}
TIES = {
    aten.max: _last_of_equals,
    aten.min: _last_of_equals,
    aten.argmax: _last_place,
    aten.argmin: _last_place,
}
NUMBERS = {
    aten.relu: lambda op, x: op(x.nan_to_num(0.0, torch.inf, -torch.inf)),
    aten.maximum: lambda op, x, y: torch.fmax(x, y),
    aten.minimum: lambda op, x, y: torch.fmin(x, y),
    aten.clamp: lambda op, x, *args, **kwargs: op(x.nan_to_num(0.0, torch.inf, -torch.inf), *args, **kwargs),
    aten.clamp_min: lambda op, x, *args: op(x.nan_to_num(0.0, torch.inf, -torch.inf), *args),
    aten.amax: lambda op, x, *args: op(x.nan_to_num(-torch.inf, torch.inf, -torch.inf), *args),
}

FAULTS: dict[str, Backend] = {
    "gradients_too_large": on_gradients(lambda one: one * 1.01),
    "one_gradient": kernels({}, {aten.tanh_backward: _larger}),
    "gelu_gradient": kernels({}, {aten.gelu_backward: lambda op, g, x, **k: op(g, x, approximate="tanh")}),
    "ten_bits": kernels(dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _ten_bits)),
    "half_sums": kernels({aten.sum: _added_in_half}),
    "half_overflow": kernels(
        {aten.linalg_vector_norm: _norm_in_half, aten.native_layer_norm: _layer_norm_in_half}
    ),
    "nan_lost": kernels(NUMBERS),
    "negative_zero": kernels({aten.neg: lambda op, x: 0 - x}),
    "max_ties": kernels(TIES),
    "broadcast_unreduced": kernels({}, {aten.sum: _first_of_many}),
    "scatter_duplicates": kernels(DUPLICATES),
    "mask_redrawn": _redrawn,
    "none_to_zeros": _zeros_for_none,
    "layout_lost": aot(_contiguous_outputs),
    "alias_copied": around(_copied),
    "mutation_dropped": kernels({aten.copy_: lambda op, to, source, *args: to}),
    "mutation_unversioned": around(_unversioned),
    "saved_overwritten": _with_saved_as_scratch,
    "static_gradients": aot(backward=_into_one_buffer),
    "hooks_dropped": around(_without_hooks),
    "hooks_twice": around(_hooks_twice),
    "hooks_reversed": around(_hooks_reversed),
    "stale_buffers": _frozen_buffers,
    "cache_without_shape": _cached(_as_long),
    "cache_without_dtype": _cached(lambda new, old: new.to(old.dtype)),
}
"""By name."""
globals().update(FAULTS)
