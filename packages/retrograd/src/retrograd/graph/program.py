"""What an exported program takes and gives.

In: made by ``aot.export``. Out: read by users.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from retrograd.graph.joint import Cotangent, Destination, Primal


class ProgramKind(enum.Enum):
    """Which part of a joint graph is the program."""

    JOINT = "joint"
    FORWARD = "forward"
    TRAINING = "training"


@dataclass(frozen=True)
class ProgramInput:
    """One tensor (or number) that a program takes.

    Attributes:
        name: ``layer.weight``, ``args[0]``, ``cotangent of output``.
        role: a primal with its kind, or a cotangent.
        shape, stride: sizes; one that may differ is an expression over the names of symbols, such as
            ``s0*2``. None for a number.
        dtype, device: of the tensor; None for a number.
    """

    name: str
    role: Primal | Cotangent
    shape: tuple[int | str, ...] | None
    stride: tuple[int | str, ...] | None
    dtype: Any
    device: Any


@dataclass(frozen=True)
class Result:
    """A value that the function returns: its number among the joint graph's forward values."""

    value: int


@dataclass(frozen=True)
class NewValue:
    """What a buffer is afterwards: the number of the buffer among the primals."""

    primal: int


@dataclass(frozen=True)
class GradientOf:
    """A gradient; `region` is None for the whole of it."""

    of: Destination
    region: int | None


@dataclass(frozen=True)
class Hidden:
    """A stand-in for a tensor inside of the function at which regions meet."""

    boundary: int


@dataclass(frozen=True)
class ProgramOutput:
    """One value that a program gives.

    Attributes:
        name: ``output['loss']``, ``new value of running_mean``, ``gradient of layer.weight``.
        role: what it means.
    """

    name: str
    role: Result | NewValue | GradientOf | Hidden


@dataclass(frozen=True)
class ProgramSignature:
    """Inputs and outputs of a program, in order."""

    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ProgramOutput, ...]

    def __str__(self) -> str:
        inputs = [f"  {one.name}: {_typed(one)}" for one in self.inputs]
        return "\n".join(["inputs", *inputs, "outputs", *(f"  {one.name}" for one in self.outputs)])


def _typed(one: ProgramInput) -> str:
    if one.shape is None:
        return "int"
    return f"{str(one.dtype).removeprefix('torch.')}[{', '.join(map(str, one.shape))}] on {one.device}"
