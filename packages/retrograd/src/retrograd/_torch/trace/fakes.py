"""Fake tensors of real ones, with static or symbolic sizes.

In: real tensors and which of their dimensions may change. Out: fakes, all of one mode; the names of the
symbols in their sizes, and where these can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, free_symbols

from retrograd._torch.fx import is_symbolic
from retrograd._torch.subclass import built, is_wrapper, layout_of, parts_of
from retrograd._torch.trace.functional import inner_tensors
from retrograd.errors import Refusal


def new_fake_mode(symbolic: bool) -> FakeTensorMode:
    """A fake mode of our own; with a shape environment if sizes may be symbolic."""
    return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None, allow_non_fake_inputs=True)


def guard_count(mode: Any) -> int:
    """How many guards the shape environment of a fake mode has; 0 without one."""
    return 0 if mode.shape_env is None else len(mode.shape_env.guards)


def is_fake(value: torch.Tensor) -> bool:
    """Whether the tensor, or what it wraps, is fake."""
    return any(isinstance(inner, FakeTensor) for inner in inner_tensors(value))


def fake_mode_of(value: torch.Tensor) -> FakeTensorMode | None:
    """The mode of a fake tensor."""
    fakes = [inner for inner in inner_tensors(value) if isinstance(inner, FakeTensor)]
    return fakes[0].fake_mode if fakes else None


def mode_among(values: Iterable[Any]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among `values`."""
    modes = (fake_mode_of(value) for value in values if isinstance(value, torch.Tensor))
    return next(filter(None, modes), None)


def alias_of_fake(value: torch.Tensor) -> torch.Tensor:
    """The fake without its history; the number in it stays known, if it is."""
    with torch.no_grad():
        bare = value.detach()
    if isinstance(bare, FakeTensor) and isinstance(value, FakeTensor) and value.item_memo is not None:
        bare.item_memo = value.item_memo
    return bare


def fake_of(mode: FakeTensorMode, value: torch.Tensor, name: str, symbolic: Iterable[int]) -> Any:
    """A fake of `value` whose dimensions in `symbolic` are symbolic, without history; it requires no grad."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        bare = value.detach()
    source, dims = ConstantSource(name), frozenset(symbolic)
    if is_wrapper(bare):
        layout = layout_of(bare)
        return built(layout, iter([fake_of(mode, part, name, ()) for part in parts_of(bare, layout)]))
    if mode.shape_env is None:
        return mode.from_tensor(bare, static_shapes=True, source=source)
    kinds = [DimDynamic.DUCK if dim in dims else DimDynamic.STATIC for dim in range(value.dim())]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(bare, symbolic_context=context, source=source)


def symbolic_integer(mode: FakeTensorMode, value: int, name: str) -> torch.SymInt | int:
    """A symbolic number that is `value` now; 0 and 1 stay what they are. `mode` has a shape environment."""
    assert mode.shape_env is not None
    source = ConstantSource(name)
    symbol = mode.shape_env.create_symbol(value, source, dynamic_dim=DimDynamic.DUCK)
    return mode.shape_env.create_symintnode(symbol, hint=value, source=source)


def why_not_fakeable(value: torch.Tensor) -> str | None:
    """Why a tensor cannot stand in a graph; None if it can."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "tensor wrapped by a functorch transform"
    try:
        layout_of(value)
    except Refusal as reason:
        return f"{type(value).__name__}: {reason}"
    for inner in inner_tensors(value) if is_wrapper(value) else [value]:
        if type(inner).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not isinstance(
            inner, FakeTensor
        ):
            return f"tensor subclass {type(inner).__name__}, which cannot be flattened"
        if inner.layout is not torch.strided:
            return f"{inner.layout} tensor"
        if inner.is_quantized or inner.is_nested:
            return "quantized tensor" if inner.is_quantized else "nested tensor"
    return None


def know_values(gm: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
    """`gm`, each of whose nodes knows now, in ``meta["val"]``, what it gives for the fake `examples`."""

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n.op != "output":
                n.meta["val"] = value
            return value

    with torch.no_grad(), mode_among(examples) or new_fake_mode(True), enable_python_dispatcher():
        Recorder(gm).run(*examples)
    return gm


def laid_out_like(fake: Any, value: Any) -> Any:
    """`fake`, or one like it with the strides of the real `value` if it has others; symbolic ones stay."""
    if not isinstance(fake, FakeTensor) or not isinstance(value, torch.Tensor):
        return fake
    if is_symbolic(fake) or fake.stride() == value.stride() or fake.shape != value.shape:
        return fake
    with fake.fake_mode, torch.no_grad():
        return torch.empty_strided(fake.shape, value.stride(), dtype=fake.dtype, device=fake.device)


def symbols_in(value: Any) -> frozenset[str]:
    """The names of the symbols in the sizes, strides and offset of a tensor, or in a number."""
    if isinstance(value, torch.Tensor):
        numbers: Sequence[Any] = (*value.shape, *value.stride(), value.storage_offset())
    elif isinstance(value, (tuple, list)):
        numbers = value
    else:
        numbers = (value,)
    found = frozenset[str]()
    for number in numbers:
        if isinstance(number, torch.Tensor):
            found |= symbols_in(number)
        elif isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found |= {str(symbol) for symbol in free_symbols(number)}
    return found


def places_of_symbols(values: Sequence[Any]) -> Mapping[str, tuple[int, int | None]]:
    """Where symbols stand by themselves: by name, the position of a value and its dimension (None: the value
    is the symbol)."""
    found: dict[str, tuple[int, int | None]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if _is_symbol(size):
                    found.setdefault(str(size), (i, dim))
        elif _is_symbol(value):
            found[str(value)] = (i, None)
    return found


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt) and bool(value.node.expr.is_Symbol)


def bytes_of(value: torch.Tensor) -> float:
    """How many bytes the elements take; for symbolic sizes, as many as at capture."""
    count = 1
    for size in value.shape:
        hint = size.node.hint if isinstance(size, torch.SymInt) else size
        count *= 1 if hint is None else int(hint)
    return float(count * value.element_size())
