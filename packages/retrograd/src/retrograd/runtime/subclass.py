"""Flattens and rebuilds wrapper tensor subclasses (the ``__tensor_flatten__`` protocol).

In: values, some of them wrapper subclasses. Out: a `SubclassSpec`: class, metadata and inner values at one
moment. We can compare it with another value, or build an equal value from other inner tensors.

In: the values of a segment. Out: a `SubclassBorder`, which flattens arguments if they still fit, wraps the
segment so that it can be traced on flat values, and rebuilds its outputs. Below the border there are only
plain tensors and numbers. A subclass's outer sizes and strides are among these numbers, so they can become
symbolic like any other.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from retrograd.errors import Refusal
from retrograd.graph.emit import Boxed
from retrograd.graph.structure import is_hashable, is_same
from retrograd.runtime.pytree import tree_leaves, tree_map

#: Types whose values contain no other values, and so nothing that was traced.
ATOMS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type, enum.Enum,
)  # fmt: skip
_FIXED: Mapping[type, Callable[[Any], Any]] = {
    torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool,
}  # fmt: skip


@dataclass(frozen=True)
class Metadata:
    """A copy of a subclass tensor's metadata.

    Attributes:
        context: the second part of ``__tensor_flatten__``.
        attributes: instance attributes that are neither inner tensors nor restored by the class itself; None
            if attributes do not matter, as in a trace, where tensors have none.
        restored: the attributes that the class restores, with their values for comparison.
        shared: whether `context` is immutable.
    """

    context: Any
    attributes: Mapping[str, Any] | None
    restored: Mapping[str, Any]
    shared: bool

    @classmethod
    def of(
        cls, tensor: torch.Tensor, inner: Sequence[str], context: Any, rebuilt: torch.Tensor | None
    ) -> Metadata:
        """Read the metadata of `tensor`. `rebuilt` is what the class makes from the flattened tensor; None
        if attributes do not matter.
        """
        name = type(tensor).__name__
        own = {} if rebuilt is None else attributes_of(tensor, inner)
        made = {} if rebuilt is None else attributes_of(rebuilt, inner)
        attributes, restored = {}, {}
        for key, value in own.items():
            if key in made and (is_same(made[key], value) or _guards_itself(tensor)):
                restored[key] = value
            elif _is_constant(value):
                attributes[key] = value
            else:
                raise Refusal(
                    "subclass-metadata", f"attribute {key!r} of {name} is lost when it is flattened"
                )
        frozen = _copied(context, f"the context of {name}")
        if not _agrees(tensor, frozen, context):
            raise Refusal("subclass-metadata", f"the context of {name} is not equal to its own copy")
        return cls(frozen, None if rebuilt is None else attributes, restored, _is_constant(context))

    def guarded(self, tensor: torch.Tensor) -> Metadata:
        """A copy for guards, which also detects in-place changes to attributes that the class restores.

        Raises:
            Refusal: an attribute cannot be copied.
        """
        kept = {} if _guards_itself(tensor) else self.restored
        what = f"an attribute of {type(tensor).__name__}"
        return replace(self, restored={key: _copied(value, what) for key, value in kept.items()})

    def holds_for(self, tensor: torch.Tensor, inner: Sequence[str], context: Any) -> bool:
        """Whether `tensor` has the same metadata."""
        agrees = _agrees(tensor, self.context, context)
        if self.attributes is None or not agrees:
            return agrees
        now = attributes_of(tensor, inner)
        known = {**self.attributes, **self.restored}
        if _guards_itself(tensor):
            return all(key in now and is_same(value, now[key]) for key, value in self.attributes.items())
        return now.keys() == known.keys() and all(is_same(value, now[key]) for key, value in known.items())

    def own_context(self) -> Any:
        """The context for one more tensor: copied if mutable, so that tensors do not share changes."""
        return self.context if self.shared else copy.deepcopy(self.context)


def attributes_of(tensor: torch.Tensor, inner: Sequence[str]) -> dict[str, Any]:
    """The instance attributes of `tensor` except for its inner tensors."""
    found = dict(vars(tensor))
    for cls in type(tensor).__mro__:
        if cls is torch.Tensor:
            break
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(tensor, name):
                found[name] = getattr(tensor, name)
    return {name: value for name, value in found.items() if name not in inner}


def holds_symbols(value: Any) -> bool:
    """Whether `value` contains, or may contain, a symbolic number."""
    return any(isinstance(leaf, tuple(_FIXED)) or not isinstance(leaf, ATOMS) for leaf in tree_leaves(value))


def without_symbols(value: Any) -> Any:
    """`value` with concrete numbers in place of symbolic ones, which become guards."""
    return tree_map(lambda leaf: _FIXED[type(leaf)](leaf) if type(leaf) in _FIXED else leaf, value)


def _guards_itself(tensor: torch.Tensor) -> bool:
    return hasattr(type(tensor), "__metadata_guard__")


def _agrees(tensor: torch.Tensor, before: Any, now: Any) -> bool:
    if _guards_itself(tensor):
        return bool(type(tensor).__metadata_guard__(before, now))  # type: ignore[attr-defined]
    return is_same(before, now)


def _is_constant(value: Any) -> bool:
    """Whether `value` is deeply immutable. A value that hashes by value must be."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    kind: Any = type(value)
    is_by_value = kind.__eq__ is not object.__eq__ and not isinstance(value, torch.Tensor)
    return isinstance(value, ATOMS) or (is_by_value and is_hashable(value))


def _copied(value: Any, what: str) -> Any:
    if _is_constant(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise Refusal("subclass-metadata", f"{what} cannot be copied: {type(error).__name__}") from error


def is_wrapper(value: Any) -> bool:
    """Whether `value` is a subclass tensor that can be flattened."""
    if type(value) is torch.Tensor or not is_traceable_wrapper_subclass(value):
        return False
    tensor: torch.Tensor = value  # type: ignore[assignment]
    return not tensor.is_nested and tensor.layout is torch.strided


@dataclass(frozen=True)
class Constant:
    """An inner value that is not a tensor."""

    value: Any = field(compare=False)
    count = 0


@dataclass(frozen=True)
class Plain:
    """A plain tensor."""

    cls = None
    count = 1


@dataclass(frozen=True)
class Wrapper:
    """A subclass tensor.

    Attributes:
        cls, metadata: its class and metadata.
        requires_grad: whether it requires grad; None if neither this nor attributes matter.
        parts: name and spec of each inner value.
        geometry: outer sizes and strides; None where the number is a flat value.
    """

    cls: Any
    metadata: Metadata = field(compare=False)
    requires_grad: bool | None
    parts: tuple[tuple[str, Plain | Wrapper | Constant], ...]
    geometry: tuple[Any, ...]

    @property
    def count(self) -> int:
        """The number of plain tensors inside it."""
        return sum(part.count for _, part in self.parts)


SubclassSpec = Plain | Wrapper
PLAIN = Plain()


def wrapper_layout(
    value: Any, part_of: Callable[[Any], SubclassSpec], requires_grad: bool | None, geometry: Any = None
) -> Wrapper:
    """The spec of a subclass tensor.

    Args:
        value: the tensor.
        part_of: returns the spec of an inner tensor.
        requires_grad: as in `Wrapper`.
        geometry: as in `Wrapper`; by default the sizes and strides of `value`.
    """
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    parts = tuple(
        (name, part_of(part) if isinstance(part, torch.Tensor) else Constant(part))
        for name, part in inner.items()
    )
    rebuilt = None
    if requires_grad is not None:
        rebuilt = type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
        if type(rebuilt) is not type(value):
            text = f"{type(value).__name__} is rebuilt as {type(rebuilt).__name__}"
            raise Refusal("subclass-metadata", text)
    metadata = Metadata.of(value, names, context, rebuilt)
    numbers = (*value.shape, *value.stride()) if geometry is None else geometry
    return Wrapper(type(value), metadata, requires_grad, parts, numbers)


def layout_of(value: Any) -> SubclassSpec:
    """The spec of `value`, ignoring `requires_grad` and attributes. A subclass tensor's symbolic sizes become
    concrete, because no graph outputs the numbers from which another tensor is built.

    Raises:
        Refusal: `value` cannot be flattened without loss.
    """
    if not is_wrapper(value):
        return PLAIN
    layout = wrapper_layout(value, layout_of, None, tuple(map(int, (*value.shape, *value.stride()))))
    metadata = layout.metadata
    return replace(layout, metadata=replace(metadata, context=without_symbols(metadata.context)))


def parts_of(value: Any, layout: SubclassSpec | Constant) -> list[Any]:
    """The plain tensors inside `value`."""
    if isinstance(layout, Wrapper):
        return [inner for name, part in layout.parts for inner in parts_of(getattr(value, name), part)]
    return [value] * layout.count


def taken(layout: SubclassSpec | Constant, value: Any, flat: list[Any]) -> bool:
    """Append the flat values of `value` to `flat`; False if `value` does not match `layout`."""
    if isinstance(layout, Constant):
        return not isinstance(value, torch.Tensor) and bool(value is layout.value or value == layout.value)
    if isinstance(layout, Plain):
        flat.append(value)
        return not is_wrapper(value)
    if type(value) is not layout.cls or layout.requires_grad not in (None, value.requires_grad):
        return False
    names, context = value.__tensor_flatten__()
    if list(names) != [name for name, _ in layout.parts] or 2 * value.dim() != len(layout.geometry):
        return False
    if any(known not in (None, size) for known, size in zip(layout.geometry, value.shape, strict=False)):
        return False
    if not layout.metadata.holds_for(value, names, context):
        return False
    if not all(taken(part, getattr(value, name), flat) for name, part in layout.parts):
        return False
    numbers = zip(layout.geometry, (*value.shape, *value.stride()), strict=True)
    flat += [number for known, number in numbers if known is None]
    return True


def fits(layout: SubclassSpec, value: Any) -> bool:
    """Whether `value` matches `layout`; its strides may differ."""
    return taken(layout, value, [])


def built(layout: SubclassSpec | Constant, flat: Iterator[Any]) -> Any:
    """Build a value from the next flat values."""
    if isinstance(layout, Constant):
        return layout.value
    if isinstance(layout, Plain):
        return next(flat)
    inner = {name: built(part, flat) for name, part in layout.parts}
    geometry = [next(flat) if number is None else number for number in layout.geometry]
    rank = len(geometry) // 2
    size, stride = torch.Size(geometry[:rank]), tuple(geometry[rank:])
    made: Any = layout.cls.__tensor_unflatten__(inner, layout.metadata.own_context(), size, stride)
    for name, value in (layout.metadata.attributes or {}).items():
        setattr(made, name, value)
    wanted = layout.requires_grad
    return made if wanted in (None, made.requires_grad) else made.requires_grad_(wanted)


@dataclass(frozen=True)
class _ByIdentity:
    """The same object as at another place: an argument of the segment, or an earlier output."""

    place: int
    is_argument: bool


class SubclassBorder:
    """Converts between subclass tensors and flat values for one lowering.

    Raises:
        Refusal: a subclass tensor cannot be flattened without loss.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        seen: dict[int, int] = {}
        first = [seen.setdefault(id(value), i) if is_wrapper(value) else i for i, value in enumerate(args)]
        self._arguments = tuple(
            _argument(value) if first[i] == i else _ByIdentity(first[i], True) for i, value in enumerate(args)
        )
        self._outputs: tuple[SubclassSpec | _ByIdentity, ...] = ()

    def enter(self, args: Sequence[Any]) -> list[Any] | None:
        """The flat values of `args`; None if a subclass tensor no longer matches its spec."""
        flat: list[Any] = []
        for i, (layout, value) in enumerate(zip(self._arguments, args, strict=True)):
            if isinstance(layout, _ByIdentity):
                if value is not args[layout.place]:
                    return None
            elif (isinstance(layout, Wrapper) and any(args[j] is value for j in range(i))) or not taken(
                layout, value, flat
            ):
                return None
        return flat

    def flattened(self, run: Boxed) -> Boxed:
        """Wrap `run` to take flat values. Each run records the specs of the outputs."""

        def run_flat(flat: list[Any]) -> list[Any]:
            values = iter(flat)
            args: list[Any] = []
            for layout in self._arguments:
                args.append(args[layout.place] if isinstance(layout, _ByIdentity) else built(layout, values))
            inputs = {id(value): i for i, value in enumerate(args) if is_wrapper(value)}
            kept = list(args)  # the segment empties its arguments, but `inputs` relies on their ids
            results = run(args)
            del kept
            return self._note_outputs(results, inputs)

        return run_flat

    def _note_outputs(self, results: Sequence[Any], inputs: dict[int, int]) -> list[Any]:
        flat: list[Any] = []
        outputs: list[SubclassSpec | _ByIdentity] = []
        places: dict[int, int] = {}
        for i, result in enumerate(results):
            if id(result) in inputs:
                outputs.append(_ByIdentity(inputs[id(result)], True))
            elif id(result) in places:
                outputs.append(_ByIdentity(places[id(result)], False))
            else:
                if is_wrapper(result):
                    places[id(result)] = i
                outputs.append(_result(result, flat))
        self._outputs = tuple(outputs)
        return flat

    def passed_through(self, args: Sequence[Any]) -> dict[int, Any]:
        """The arguments that are returned unchanged, by position."""
        return {
            layout.place: args[layout.place]
            for layout in self._outputs
            if isinstance(layout, _ByIdentity) and layout.is_argument
        }

    def exit(self, flat: Sequence[Any], passed: dict[int, Any]) -> list[Any]:
        """The segment's outputs, built from its flat results and the arguments from `passed_through`."""
        values = iter(flat)
        outputs: list[Any] = []
        for layout in self._outputs:
            if isinstance(layout, _ByIdentity):
                outputs.append(passed[layout.place] if layout.is_argument else outputs[layout.place])
            else:
                outputs.append(built(layout, values))
        return outputs

    def __str__(self) -> str:
        names = [layout.cls.__name__ for layout in self._arguments if isinstance(layout, Wrapper)]
        return f"{len(names)} subclass tensors ({', '.join(dict.fromkeys(names))}): class, metadata"


def _argument(value: Any) -> SubclassSpec:
    """The spec of an argument, with all its numbers as flat values. Its guard detects later changes to
    attributes that the class restores."""
    if not is_wrapper(value):
        return PLAIN
    layout = wrapper_layout(value, _argument, value.requires_grad, (None,) * 2 * value.dim())
    return replace(layout, metadata=layout.metadata.guarded(value))


def _result(value: Any, flat: list[Any]) -> SubclassSpec:
    """The spec of an output during the trace, or of a tensor inside it; appends its flat values to `flat`."""
    if not is_wrapper(value):
        if isinstance(value, torch.Tensor) and type(value) not in TRACED:
            raise Refusal(
                "subclass-metadata", f"tensor subclass {type(value).__name__} comes out of the segment"
            )
        flat.append(value)
        return PLAIN
    names, context = value.__tensor_flatten__()
    geometry = (*value.shape, *value.stride())
    symbols = [number for number in geometry if isinstance(number, torch.SymInt)]
    if symbols and (holds_symbols(context) or holds_symbols(attributes_of(value, names))):
        raise Refusal("symbolic-metadata", f"{type(value).__name__} keeps a symbolic size in its metadata")
    known = tuple(None if isinstance(number, torch.SymInt) else number for number in geometry)
    layout = wrapper_layout(value, lambda inner: _result(inner, flat), value.requires_grad, known)
    flat += symbols
    return layout


TRACED = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch._subclasses.FakeTensor)
