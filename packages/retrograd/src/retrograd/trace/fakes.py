"""Fake tensors for real ones, with static or symbolic sizes.

In: real tensors, and which of their dimensions may change. Out: fakes of one fake mode; the names of the
symbols in their sizes, and where each can be read.
"""

from __future__ import annotations

import itertools
import math
import os
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, free_symbols

from retrograd.errors import Refusal
from retrograd.graph.aliases import aliased_inputs
from retrograd.graph.fx import has_other_strides
from retrograd.runtime.subclass import built, is_wrapper, layout_of, parts_of
from retrograd.runtime.tensor import inner_tensors, is_lazy


def new_fake_mode(symbolic: bool) -> FakeTensorMode:
    """A new fake mode; with a shape environment if sizes may be symbolic."""
    return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None, allow_non_fake_inputs=True)


def read_anew(mode: Any) -> None:
    """Make each number read from a fake from now on a new symbol.

    Otherwise a fact about an earlier symbol, such as a ``torch._check`` in Dynamo's trace, would be assumed
    for the new number, and no call would check it.
    """
    mode.epoch += 1


def checks_known(mode: Any) -> dict[int, Any]:
    """The runtime assertions that a fake mode has recorded, by identity."""
    lists = () if mode.shape_env is None else mode.shape_env.deferred_runtime_asserts.values()
    return {id(check): check for checks in lists for check in checks}


def refuse_lost_checks(mode: Any, before: Mapping[int, Any]) -> None:
    """Refuse a trace in which user code called ``torch._check`` since `before`: the graph would not contain
    the check.

    Checks that operators make are allowed, because the operators repeat them at run time.

    Raises:
        Refusal: user code made such a check.
    """
    for key, check in checks_known(mode).items():
        if key not in before and _is_users(check.stack.summary()):
            raise Refusal("not-representable", "it checks a number that it reads out of a tensor")


def _is_users(stack: Sequence[traceback.FrameSummary]) -> bool:
    """True if code outside torch called ``torch._check`` or one of its variants."""
    callers = (
        caller.filename
        for caller, called in itertools.pairwise(stack)
        if called.filename == torch.__file__ and called.name.startswith("_check")
    )
    return not next(callers, torch.__file__).startswith(os.path.dirname(torch.__file__))


def guard_count(mode: Any) -> int:
    """The number of guards in a fake mode's shape environment; 0 if it has none."""
    return 0 if mode.shape_env is None else len(mode.shape_env.guards)


def is_fake(value: torch.Tensor) -> bool:
    """True if the tensor, or a tensor it wraps, is fake."""
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
    """The fake without its history. If the number in it is known, it stays known."""
    with torch.no_grad():
        bare = value.detach()
    if isinstance(bare, FakeTensor) and isinstance(value, FakeTensor) and value.item_memo is not None:
        bare.item_memo = value.item_memo
    return bare


def fake_of(mode: FakeTensorMode, value: torch.Tensor, name: str, symbolic: Iterable[int]) -> Any:
    """A fake of `value` without history that does not require grad. Its dimensions in `symbolic` are
    symbolic."""
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
    """A symbolic number whose current value is `value`; 0 and 1 are specialised. `mode` needs a shape
    environment."""
    assert mode.shape_env is not None
    source = ConstantSource(name)
    symbol = mode.shape_env.create_symbol(value, source, dynamic_dim=DimDynamic.DUCK)
    return mode.shape_env.create_symintnode(symbol, hint=value, source=source)


def why_not_fakeable(value: torch.Tensor) -> str | None:
    """Why a tensor cannot be an input of a graph; None if it can."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "tensor wrapped by a functorch transform"
    if torch._is_functional_tensor(value):
        return "tensor that functionalization has wrapped"
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


def know_values(
    gm: fx.GraphModule, examples: Sequence[Any], stale: Collection[fx.Node] = frozenset()
) -> fx.GraphModule:
    """Return `gm` after writing each node's value for the fake `examples` into its ``meta["val"]``.

    A known value is recomputed only if its node is `stale` or depends on a value that changed.
    """
    changed = set[fx.Node]()

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            known = n.meta.get("val")
            is_kept = n.op != "placeholder" and known is not None and n not in stale
            if is_kept and changed.isdisjoint(n.all_input_nodes):
                return known
            value = super().run_node(n)
            form = form_of(value)
            if value is known or (form is not None and form == form_of(known) and not aliased_inputs(n)):
                return known
            changed.add(n)
            if n.op != "output":
                n.meta["val"] = value
            return value

    with torch.no_grad(), mode_among(examples) or new_fake_mode(True), enable_python_dispatcher():
        Recorder(gm).run(*examples)
    return gm


@dataclass(frozen=True)
class Form:
    """The layout of a strided fake tensor with static sizes, and the `nbytes` of its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int


def form_of(value: Any) -> Form | None:
    """The form of a fake tensor; None if a form does not describe it.

    A form describes only plain strided fakes with static sizes and a storage of static size, and no lazily
    negated or conjugated ones.
    """
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return None
    if value._has_symbolic_sizes_strides or is_lazy(value):
        return None
    size, offset, nbytes = tuple(value.shape), value.storage_offset(), value.untyped_storage().nbytes()
    if type(offset) is not int or type(nbytes) is not int:
        return None
    return Form(size, value.stride(), offset, value.dtype, value.fake_device, nbytes)


def fake_of_form(mode: FakeTensorMode, form: Form, memory: torch.UntypedStorage | None = None) -> FakeTensor:
    """A fake without history, in `memory` (the storage of a fake of the same mode) or in new memory.

    We bypass the mode's dispatch, which would take ten times as long.
    """
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="meta")
        if memory is None and (form.offset or made.untyped_storage().nbytes() != form.nbytes):
            memory = torch.empty(form.nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        if memory is not None:
            made.set_(memory, form.offset, form.size, form.stride)
        return FakeTensor(mode, made, form.device)


def laid_out_like(fake: Any, value: Any) -> Any:
    """`fake`, or a fake with the strides of the real `value` if these differ. A symbolic fake is returned
    unchanged."""
    if not isinstance(fake, FakeTensor) or not has_other_strides(value, fake):
        return fake
    with fake.fake_mode, torch.no_grad():
        return torch.empty_strided(fake.shape, value.stride(), dtype=fake.dtype, device=fake.device)


def symbols_in(value: Any) -> frozenset[str]:
    """The names of the symbols in the sizes, strides and offset of a tensor, or in a number."""
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, tuple, list)
    return frozenset(map(str, free_symbols(value))) if isinstance(value, kinds) else frozenset()


def places_of_symbols(values: Sequence[Any]) -> Mapping[str, tuple[int, int | None]]:
    """Where each symbol can be read directly: the position of a value, and its dimension (None: the value
    itself)."""
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
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and bool(value.node.expr.is_Symbol)


def hint_of(number: Any) -> Any:
    """The number itself; for a symbolic one, its value at capture (None if unknown)."""
    return number.node.hint if isinstance(number, torch.SymInt) else number


def bytes_of(value: torch.Tensor) -> float:
    """The size of the elements in bytes. Symbolic sizes count with their values at capture."""
    hints = [hint_of(size) for size in value.shape]
    return float(math.prod([1 if hint is None else int(hint) for hint in hints]) * value.element_size())


def forget_real_tensors(mode: Any) -> None:
    """Drop the weak references that `mode` holds to the tensors of which it made fakes.

    ``torch.utils.swap_tensors`` refuses a tensor with a weak reference. Afterwards, the mode makes a new fake
    for a tensor it has seen before.
    """
    if mode is not None:
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()
