"""Do inputs fit what a program was captured for?

In: what each input must be like, and the guards of the capture. Out: the inputs, in the layout that was
traced, or an `ExportError` that names the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd._torch.trace import Symbol, Tree, holds, value_of
from retrograd.errors import ExportError, Reason


@dataclass(frozen=True)
class Expected:
    """What one input must be like; sizes and strides as trees. A number has neither."""

    name: str
    size: tuple[Tree, ...] | None
    stride: tuple[Tree, ...] | None
    dtype: Any
    device: Any
    number: Tree = None


@dataclass(frozen=True)
class InputFit:
    """What all inputs must be like.

    Attributes:
        expected: one per input.
        symbols: sizes that may differ.
        guards: relations that must hold between them.
    """

    expected: tuple[Expected, ...]
    symbols: Mapping[str, Symbol] = field(default_factory=dict)
    guards: tuple[Tree, ...] = ()

    def checked(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, laid out as they were traced.

        Raises:
            ExportError: one is missing, or is not like what was captured.
        """
        if len(inputs) != len(self.expected):
            text = f"{len(inputs)} inputs where the program takes {len(self.expected)}"
            raise refused("arity", text, "", "see signature.inputs")
        values: dict[str, int] = {}
        for expected, given in zip(self.expected, inputs, strict=True):
            self._bind(expected, given, values)
        for expected, given in zip(self.expected, inputs, strict=True):
            _check_sizes(expected, given, values)
        for guard in self.guards:
            if not holds(guard, values):
                text = f"sizes {values} do not satisfy {guard}, which the capture relied on"
                raise refused("guard", text, "sizes", "capture again with such sizes")
        return [
            _laid_out(expected, given, values) for expected, given in zip(self.expected, inputs, strict=True)
        ]

    def _bind(self, expected: Expected, given: Any, values: dict[str, int]) -> None:
        if expected.size is None:
            if type(given) is not int:
                raise _unfit(expected, f"is a {type(given).__name__}, not an int")
            self._bind_size(expected, expected.number, given, values)
            return
        if not isinstance(given, torch.Tensor):
            raise _unfit(expected, f"is a {type(given).__name__}, not a tensor")
        if given.dtype != expected.dtype or given.device != expected.device:
            was = f"{expected.dtype} on {expected.device}"
            raise _unfit(expected, f"is {given.dtype} on {given.device}, and was {was} at capture")
        if given.dim() != len(expected.size):
            raise _unfit(expected, f"has {given.dim()} dimensions, and had {len(expected.size)} at capture")
        for size, tree in zip(given.shape, expected.size, strict=True):
            self._bind_size(expected, tree, size, values)

    def _bind_size(self, expected: Expected, tree: Tree, size: int, values: dict[str, int]) -> None:
        if not isinstance(tree, str):
            return
        symbol = self.symbols[tree]
        low, high = symbol.lower, symbol.upper
        if (low is not None and size < low) or (high is not None and size > high):
            raise _unfit(
                expected, f"has a size {size}, and the capture is for sizes from {low} to {high or 'any'}"
            )
        values.setdefault(tree, size)


def _check_sizes(expected: Expected, given: Any, values: Mapping[str, int]) -> None:
    trees = (expected.number,) if expected.size is None else expected.size
    wanted = [value_of(tree, values) for tree in trees]
    found = [given] if expected.size is None else list(given.shape)
    if found != wanted:
        raise _unfit(expected, f"has sizes {found}, and {wanted} fit the capture and the other inputs")


def _laid_out(expected: Expected, given: Any, values: Mapping[str, int]) -> Any:
    """The input in the layout that was traced."""
    if expected.stride is None:
        return given
    strides = tuple(value_of(tree, values) for tree in expected.stride)
    if given.stride() == strides:
        return given.detach()
    made = torch.empty_strided(given.shape, strides, dtype=given.dtype, device=given.device)
    return made.copy_(given.detach())


def _unfit(expected: Expected, found: str) -> ExportError:
    return refused(
        "input", f"input {expected.name} {found}", expected.name, "give what was captured, or capture again"
    )


def refused(code: str, text: str, name: str, way_out: str) -> ExportError:
    """The error that says what about an input `name` a program does not take."""
    return ExportError(Reason(code, text, "aot.program", node=name, way_out=way_out))
