"""Wrapper subclasses at the border of a segment: taken apart to inner tensors, and put together again.

In: the values of a segment, some of them tensors that follow the ``__tensor_flatten__`` protocol. Out: a
`SubclassBorder`, which flattens arguments (if they still fit), wraps the segment so that it can be traced on
flat values, and rebuilds its outputs. Below the border there are only plain tensors and numbers: the outer
sizes and strides of a subclass are numbers too, so that they may become symbolic like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from retrograd._torch.subclass.metadata import Metadata, attributes_of, holds_symbols
from retrograd.errors import Refusal

Boxed = Callable[[list[Any]], Sequence[Any]]


def is_wrapper(value: Any) -> bool:
    """Whether `value` is a subclass tensor that can be flattened."""
    if type(value) is torch.Tensor or not is_traceable_wrapper_subclass(value):
        return False
    tensor: torch.Tensor = value  # type: ignore[assignment]
    return not tensor.is_nested and tensor.layout is torch.strided


@dataclass(frozen=True)
class _Plain:
    """One flat value."""


@dataclass(frozen=True)
class _Same:
    """The very object at another place: an argument (of the segment) or an output before it."""

    place: int
    is_argument: bool


@dataclass(frozen=True)
class _Wrapper:
    """A subclass tensor.

    Attributes:
        cls, metadata, requires_grad: what it is besides its parts.
        parts: name and layout of each inner value; an inner value that is no tensor stands for itself.
        geometry: outer sizes and strides; None where the number is a flat value.
    """

    cls: Any
    metadata: Metadata
    requires_grad: bool
    parts: tuple[tuple[str, _Layout | _Constant], ...]
    geometry: tuple[int | None, ...]


@dataclass(frozen=True)
class _Constant:
    value: Any = field(compare=False)


_Layout = _Plain | _Same | _Wrapper
_PLAIN = _Plain()


class SubclassBorder:
    """Arguments of one lowering that has subclass tensors among them.

    Args:
        args: the values that the segment is lowered with.

    Attributes:
        numbers: positions among the flat values that are outer sizes and strides.

    Raises:
        Refusal: a subclass that cannot be taken apart without loss.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self._first = _first_places(args)
        self._arguments = tuple(
            _layout(value) if self._first[i] == i else _Same(self._first[i], True)
            for i, value in enumerate(args)
        )
        self.numbers = frozenset(_numbers(self._arguments))
        self._outputs: tuple[_Layout, ...] = ()

    def enter(self, args: Sequence[Any]) -> list[Any] | None:
        """The flat values of `args`; None if a subclass is not what it was."""
        flat: list[Any] = []
        for i, (layout, value) in enumerate(zip(self._arguments, args, strict=True)):
            if isinstance(layout, _Same):
                if value is not args[layout.place]:
                    return None
            elif (isinstance(layout, _Wrapper) and self._met_before(args, i)) or not _take(
                layout, value, flat
            ):
                return None
        return flat

    def _met_before(self, args: Sequence[Any], place: int) -> bool:
        return any(args[i] is args[place] for i in range(place))

    def flattened(self, run: Boxed) -> Boxed:
        """`run` on flat values; notes how its outputs are made up."""

        def run_flat(flat: list[Any]) -> list[Any]:
            values = iter(flat)
            args: list[Any] = []
            for layout in self._arguments:
                same = isinstance(layout, _Same)
                args.append(args[layout.place] if same else _build(layout, values))  # type: ignore[union-attr]
            inputs = {id(value): i for i, value in enumerate(args) if is_wrapper(value)}
            kept = list(args)  # the segment empties its arguments; `inputs` has their ids
            results = run(args)
            del kept
            return self._note_outputs(results, inputs)

        return run_flat

    def _note_outputs(self, results: Sequence[Any], inputs: dict[int, int]) -> list[Any]:
        flat: list[Any] = []
        outputs: list[_Layout] = []
        places: dict[int, int] = {}
        for i, result in enumerate(results):
            if not is_wrapper(result):
                _refuse_other_subclass(result)
                outputs.append(_PLAIN)
                flat.append(result)
            elif id(result) in inputs:
                outputs.append(_Same(inputs[id(result)], True))
            elif id(result) in places:
                outputs.append(_Same(places[id(result)], False))
            else:
                places[id(result)] = i
                outputs.append(_traced_wrapper(result, flat))
        self._outputs = tuple(outputs)
        return flat

    def passed_through(self, args: Sequence[Any]) -> dict[int, Any]:
        """The arguments that are outputs as they are, by position."""
        return {
            layout.place: args[layout.place]
            for layout in self._outputs
            if isinstance(layout, _Same) and layout.is_argument
        }

    def exit(self, flat: Sequence[Any], passed: dict[int, Any]) -> list[Any]:
        """The segment's outputs, of its flat results and what `passed_through` kept."""
        values = iter(flat)
        outputs: list[Any] = []
        for layout in self._outputs:
            if isinstance(layout, _Same):
                outputs.append(passed[layout.place] if layout.is_argument else outputs[layout.place])
            else:
                outputs.append(_build(layout, values))
        return outputs

    def __str__(self) -> str:
        names = [layout.cls.__name__ for layout in self._arguments if isinstance(layout, _Wrapper)]
        return f"{len(names)} subclass tensors ({', '.join(dict.fromkeys(names))}): class, metadata"


def _first_places(args: Sequence[Any]) -> list[int]:
    """For each argument its own place, or that of the same subclass tensor before it."""
    seen: dict[int, int] = {}
    return [seen.setdefault(id(value), i) if is_wrapper(value) else i for i, value in enumerate(args)]


def _layout(value: Any) -> _Layout:
    """The layout of an argument, all of whose numbers are flat values."""
    if not is_wrapper(value):
        return _PLAIN
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    parts = tuple((name, _part(part)) for name, part in inner.items())
    rebuilt = type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
    if type(rebuilt) is not type(value):
        raise Refusal("subclass-metadata", f"{type(value).__name__} is rebuilt as {type(rebuilt).__name__}")
    metadata = Metadata.of(value, names, context, rebuilt).guarded(value)
    return _Wrapper(type(value), metadata, value.requires_grad, parts, (None,) * 2 * value.dim())


def _part(part: Any) -> _Layout | _Constant:
    return _layout(part) if isinstance(part, torch.Tensor) else _Constant(part)


def _numbers(layouts: Sequence[_Layout]) -> Iterator[int]:
    """Positions of the numbers among the flat values."""
    place = 0
    for layout in layouts:
        for is_number in _kinds(layout):
            if is_number:
                yield place
            place += 1


def _kinds(layout: _Layout | _Constant) -> Iterator[bool]:
    """For each flat value of a layout, whether it is a number of its geometry."""
    if isinstance(layout, _Plain):
        yield False
    elif isinstance(layout, _Wrapper):
        for _, part in layout.parts:
            yield from _kinds(part)
        yield from (True for number in layout.geometry if number is None)


def _take(layout: _Layout | _Constant, value: Any, flat: list[Any]) -> bool:
    """Put the flat values of `value` into `flat`, if it has this layout."""
    if isinstance(layout, _Constant):
        return not isinstance(value, torch.Tensor) and bool(value is layout.value or value == layout.value)
    if isinstance(layout, _Plain):
        flat.append(value)
        return not is_wrapper(value)
    assert isinstance(layout, _Wrapper)
    if type(value) is not layout.cls or value.requires_grad != layout.requires_grad:
        return False
    names, context = value.__tensor_flatten__()
    if list(names) != [name for name, _ in layout.parts] or 2 * value.dim() != len(layout.geometry):
        return False
    if not layout.metadata.holds_for(value, names, context):
        return False
    if not all(_take(part, getattr(value, name), flat) for name, part in layout.parts):
        return False
    flat += [*value.shape, *value.stride()]
    return True


def _build(layout: _Layout | _Constant, flat: Iterator[Any]) -> Any:
    """Put a value together of its flat values."""
    if isinstance(layout, _Constant):
        return layout.value
    if not isinstance(layout, _Wrapper):
        return next(flat)
    inner = {name: _build(part, flat) for name, part in layout.parts}
    geometry = [next(flat) if number is None else number for number in layout.geometry]
    rank = len(geometry) // 2
    size, stride = torch.Size(geometry[:rank]), tuple(geometry[rank:])
    made: Any = layout.cls.__tensor_unflatten__(inner, layout.metadata.own_context(), size, stride)
    layout.metadata.put_on(made)
    return made if made.requires_grad == layout.requires_grad else made.requires_grad_(layout.requires_grad)


def _traced_part(value: Any, flat: list[Any]) -> _Layout | _Constant:
    """The layout of an inner value of an output while it is traced; its flat values go to `flat`."""
    if not isinstance(value, torch.Tensor):
        return _Constant(value)
    if is_wrapper(value):
        return _traced_wrapper(value, flat)
    _refuse_other_subclass(value)
    flat.append(value)
    return _PLAIN


def _traced_wrapper(value: Any, flat: list[Any]) -> _Wrapper:
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    parts = tuple((name, _traced_part(part, flat)) for name, part in inner.items())
    geometry = [*value.shape, *value.stride()]
    symbols = [number for number in geometry if isinstance(number, torch.SymInt)]
    if symbols and (holds_symbols(context) or holds_symbols(attributes_of(value, names))):
        raise Refusal("symbolic-metadata", f"{type(value).__name__} keeps a symbolic size in its metadata")
    flat += symbols
    rebuilt = type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
    metadata = Metadata.of(value, names, context, rebuilt)
    known = tuple(None if isinstance(number, torch.SymInt) else number for number in geometry)
    return _Wrapper(type(value), metadata, value.requires_grad, parts, known)


def _refuse_other_subclass(value: Any) -> None:
    if isinstance(value, torch.Tensor) and type(value) not in _TRACED:
        raise Refusal("subclass-metadata", f"tensor subclass {type(value).__name__} comes out of the segment")


_TRACED = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch._subclasses.FakeTensor)
