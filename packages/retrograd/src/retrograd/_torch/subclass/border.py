"""Wrapper subclasses at the border of a segment: taken apart to inner tensors, and put together again.

In: the values of a segment, some of them tensors that follow the ``__tensor_flatten__`` protocol. Out: a
`SubclassBorder`, which flattens arguments (if they still fit), wraps the segment so that it can be traced on
flat values, and rebuilds its outputs. Below the border there are only plain tensors and numbers: the outer
sizes and strides of a subclass are numbers too, so that they may become symbolic like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrograd._torch.subclass.layout import (
    PLAIN,
    Constant,
    Layout,
    Plain,
    Wrapper,
    attributes_of,
    built,
    holds_symbols,
    is_wrapper,
    taken,
    wrapper_layout,
)
from retrograd.errors import Refusal
from retrograd.graph.emit import Boxed


@dataclass(frozen=True)
class _Same:
    """The very object at another place: an argument (of the segment) or an output before it."""

    place: int
    is_argument: bool


class SubclassBorder:
    """Arguments of one lowering that has subclass tensors among them.

    Attributes:
        numbers: positions among the flat values that are outer sizes and strides.

    Raises:
        Refusal: a subclass that cannot be taken apart without loss.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        seen: dict[int, int] = {}
        first = [seen.setdefault(id(value), i) if is_wrapper(value) else i for i, value in enumerate(args)]
        self._arguments = tuple(
            _argument(value) if first[i] == i else _Same(first[i], True) for i, value in enumerate(args)
        )
        kinds = (is_number for layout in self._arguments for is_number in _are_numbers(layout))
        self.numbers = frozenset(i for i, is_number in enumerate(kinds) if is_number)
        self._outputs: tuple[Layout | _Same, ...] = ()

    def enter(self, args: Sequence[Any]) -> list[Any] | None:
        """The flat values of `args`; None if a subclass is not what it was."""
        flat: list[Any] = []
        for i, (layout, value) in enumerate(zip(self._arguments, args, strict=True)):
            if isinstance(layout, _Same):
                if value is not args[layout.place]:
                    return None
            elif (isinstance(layout, Wrapper) and any(args[j] is value for j in range(i))) or not taken(
                layout, value, flat
            ):
                return None
        return flat

    def flattened(self, run: Boxed) -> Boxed:
        """`run` on flat values; notes how its outputs are made up."""

        def run_flat(flat: list[Any]) -> list[Any]:
            values = iter(flat)
            args: list[Any] = []
            for layout in self._arguments:
                args.append(args[layout.place] if isinstance(layout, _Same) else built(layout, values))
            inputs = {id(value): i for i, value in enumerate(args) if is_wrapper(value)}
            kept = list(args)  # the segment empties its arguments; `inputs` has their ids
            results = run(args)
            del kept
            return self._note_outputs(results, inputs)

        return run_flat

    def _note_outputs(self, results: Sequence[Any], inputs: dict[int, int]) -> list[Any]:
        flat: list[Any] = []
        outputs: list[Layout | _Same] = []
        places: dict[int, int] = {}
        for i, result in enumerate(results):
            if id(result) in inputs:
                outputs.append(_Same(inputs[id(result)], True))
            elif id(result) in places:
                outputs.append(_Same(places[id(result)], False))
            else:
                if is_wrapper(result):
                    places[id(result)] = i
                outputs.append(_result(result, flat))
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
                outputs.append(built(layout, values))
        return outputs

    def __str__(self) -> str:
        names = [layout.cls.__name__ for layout in self._arguments if isinstance(layout, Wrapper)]
        return f"{len(names)} subclass tensors ({', '.join(dict.fromkeys(names))}): class, metadata"


def _argument(value: Any) -> Layout:
    """The layout of an argument, all of whose numbers are flat values; later changes to what its class
    restores are noticed."""
    if not is_wrapper(value):
        return PLAIN
    layout = wrapper_layout(value, _argument, value.requires_grad, (None,) * 2 * value.dim())
    return replace(layout, metadata=layout.metadata.guarded(value))


def _are_numbers(layout: Layout | Constant | _Same) -> Iterator[bool]:
    """For each flat value of a layout, whether it is a number of its geometry."""
    if isinstance(layout, Plain):
        yield False
    elif isinstance(layout, Wrapper):
        for _, part in layout.parts:
            yield from _are_numbers(part)
        yield from (True for number in layout.geometry if number is None)


def _result(value: Any, flat: list[Any]) -> Layout:
    """The layout of an output, or of a tensor in it, while it is traced; its flat values go to `flat`."""
    if not is_wrapper(value):
        if isinstance(value, torch.Tensor) and type(value) not in _TRACED:
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


_TRACED = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch._subclasses.FakeTensor)
