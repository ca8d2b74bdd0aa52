"""An exported program: a frozen value that can be called, saved, and compiled.

In: made by ``aot.export`` and ``aot.load``. Out: what the program takes and gives; results, new values of
buffers, and gradients, by name; or an `ExportError` that names the input that is not like the captured one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from retrograd._torch import pytree
from retrograd._torch.state import autocast_off
from retrograd._torch.trace import Symbol, Tree, evaluated
from retrograd.aot.capture import JointGraph
from retrograd.errors import ExportError
from retrograd.graph.joint import Cotangent, Destination, Primal
from retrograd.graph.joint_graph import ComputedOutput, ConstantOutput, SameAs, SizeOutput, SizeValue
from retrograd.graph.structure import is_same


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
        trees: what sizes and strides must be; of a number, what it must be itself.
    """

    name: str
    role: Primal | Cotangent
    shape: tuple[int | str, ...] | None
    stride: tuple[int | str, ...] | None
    dtype: Any
    device: Any
    trees: tuple[Sequence[Tree], Sequence[Tree]] = field(repr=False, compare=False)


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


@dataclass(frozen=True)
class InputCheck:
    """What all inputs must be like."""

    expected: tuple[ProgramInput, ...]
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
            wanted = [int(evaluated(tree, values)) for tree in expected.trees[0]]
            found = [given] if expected.shape is None else list(given.shape)
            if found != wanted:
                raise _unfit(
                    expected, f"has sizes {found}, and {wanted} fit the capture and the other inputs"
                )
        for guard in self.guards:
            if not evaluated(guard, values):
                text = f"sizes {values} do not satisfy {guard}, which the capture relied on"
                raise refused("guard", text, "sizes", "capture again with such sizes")
        return [
            _laid_out(expected, given, values) for expected, given in zip(self.expected, inputs, strict=True)
        ]

    def _bind(self, expected: ProgramInput, given: Any, values: dict[str, int]) -> None:
        sizes = expected.trees[0]
        if expected.shape is None:
            if type(given) is not int:
                raise _unfit(expected, f"is a {type(given).__name__}, not an int")
            self._bind_size(expected, sizes[0], given, values)
            return
        if not isinstance(given, torch.Tensor):
            raise _unfit(expected, f"is a {type(given).__name__}, not a tensor")
        if given.dtype != expected.dtype or given.device != expected.device:
            was = f"{expected.dtype} on {expected.device}"
            raise _unfit(expected, f"is {given.dtype} on {given.device}, and was {was} at capture")
        if given.dim() != len(sizes):
            raise _unfit(expected, f"has {given.dim()} dimensions, and had {len(sizes)} at capture")
        for size, tree in zip(given.shape, sizes, strict=True):
            self._bind_size(expected, tree, size, values)

    def _bind_size(self, expected: ProgramInput, tree: Tree, size: int, values: dict[str, int]) -> None:
        if not isinstance(tree, str):
            return
        symbol = self.symbols[tree]
        low, high = symbol.lower, symbol.upper
        if (low is not None and size < low) or (high is not None and size > high):
            raise _unfit(
                expected, f"has a size {size}, and the capture is for sizes from {low} to {high or 'any'}"
            )
        values.setdefault(tree, size)


def _laid_out(expected: ProgramInput, given: Any, values: Mapping[str, int]) -> Any:
    """The input in the layout that was traced."""
    if expected.shape is None:
        return given
    strides = tuple(int(evaluated(tree, values)) for tree in expected.trees[1])
    if given.stride() == strides:
        return given.detach()
    return given.detach().new_empty_strided(given.shape, strides).copy_(given.detach())


def _unfit(expected: ProgramInput, found: str) -> ExportError:
    return refused(
        "input", f"input {expected.name} {found}", expected.name, "give what was captured, or capture again"
    )


def refused(code: str, text: str, name: str, way_out: str) -> ExportError:
    """The error that says what about an input `name` a program does not take."""
    return ExportError.because(code, text, "aot.program", node=name, way_out=way_out)


@dataclass(frozen=True, eq=False)
class ProgramResult:
    """What a call of a program gives.

    Attributes:
        value: what the function returns.
        updates: by name, what its buffers are afterwards; nothing is changed in place.
        gradients: by name; a primal that gets none is absent. Empty unless the program has a backward.
    """

    value: Any
    updates: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Exported:
    """A program.

    Attributes:
        kind: which part of the joint graph it is.
        joint: the whole joint graph, which can be partitioned and compiled.
        gm: the program: a functional graph of its inputs, with the constants that it needs.
        signature: what the inputs and outputs of `gm` mean.
        loss: name of the output that is differentiated; None unless `kind` is `TRAINING`.
    """

    kind: ProgramKind
    joint: JointGraph
    gm: fx.GraphModule
    signature: ProgramSignature
    input_check: InputCheck = field(repr=False)
    loss: str | None = None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the graph.

        Args:
            inputs: one for each of ``signature.inputs``.

        Returns:
            One value for each of ``signature.outputs``. They have no history.

        Raises:
            ExportError: an input that the graph was not captured for.
        """
        values = iter(self.input_check.checked(inputs))
        fed = [primal.found if primal.found is not None else next(values) for primal in self.joint.primals]
        with torch.no_grad(), autocast_off():
            return tuple(self.gm(*fed, *values))

    def call_by_name(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The same by names.

        Raises:
            ExportError: a name is missing, or an input does not fit.
        """
        names = [one.name for one in self.signature.inputs]
        if missing := [name for name in names if name not in inputs]:
            raise refused(
                "missing-input",
                f"input {missing[0]} is missing",
                missing[0],
                f"inputs are {', '.join(names)}",
            )
        results = self(*[inputs[name] for name in names])
        return {one.name: value for one, value in zip(self.signature.outputs, results, strict=True)}

    def run(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> ProgramResult:
        """Call the function that was captured.

        Args:
            state: parameters and buffers by name, such as ``module.state_dict()``.
            args, kwargs: as the function takes them.

        Raises:
            ExportError: the arguments are nested in another way than at capture, an entry of `state` is
                missing, or the program is a joint graph, which takes cotangents.
        """
        if self.kind is ProgramKind.JOINT:
            text = "a joint program takes cotangents besides the arguments"
            raise refused(
                "joint-program", text, "cotangents", "call it, or export kind='forward' or 'training'"
            )
        leaves = self.leaves(state, *args, **kwargs)
        taken = [leaves[p.leaf] for p in self.joint.primals if p.found is None and p.leaf is not None]
        return self._result(leaves, self(*taken))

    def leaves(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Flat inputs, as a function made by ``aot.compile`` takes them; see `run`."""
        known = self.joint.state.leaves
        spec = self.joint.state.in_spec
        flat, found = pytree.tree_flatten((args, kwargs))
        if spec is None or found != spec:
            text = f"the arguments are built as {found}, and were {spec} at capture"
            raise refused("arguments", text, "arguments", "give them as at capture")
        count = len(known) - len(flat)
        leaves = []
        for leaf in known[:count]:
            if leaf.name not in state:
                raise refused(
                    "missing-input", f"{leaf.name} is not in the state", leaf.name, "module.state_dict()"
                )
            leaves.append(state[leaf.name])
        for leaf, value in zip(known[count:], flat, strict=True):
            if leaf.kind is None and not is_same(leaf.value, value):
                text = f"{leaf.name} is {value!r}, and was the constant {leaf.value!r} at capture"
                raise refused("constant", text, leaf.name, "give the same constant, or capture again")
            leaves.append(value)
        for number, leaf in enumerate(known):
            if leaf.same_as is not None and leaves[number] is not leaves[leaf.same_as]:
                text = f"{leaf.name} and {known[leaf.same_as].name} were one tensor at capture, and are two"
                raise refused("not-the-same", text, leaf.name, "give the same tensor for both")
        return leaves

    def _result(self, leaves: Sequence[Any], given: Sequence[Any]) -> ProgramResult:
        values: dict[int, Any] = {}
        updates: dict[str, Any] = {}
        changed: dict[int, Any] = {}
        gradients: dict[str, Any] = {}
        primals = self.joint.primals
        for output, value in zip(self.signature.outputs, given, strict=True):
            match output.role:
                case Result(number):
                    values[number] = value
                case NewValue(primal):
                    updates[primals[primal].name] = value
                    changed[primals[primal].leaf] = value  # type: ignore[index]
                case GradientOf(of, _):
                    gradients[primals[of.index].name] = value
        for update in self.joint.updates:
            if update.value is not None:
                values.setdefault(update.value, updates[primals[update.primal].name])
        flat = []
        for plan in self.joint.outputs:
            match plan:
                case ComputedOutput(number):
                    flat.append(values[number])
                case ConstantOutput(constant):
                    flat.append(constant)
                case SizeOutput(sizes):
                    flat.append(
                        torch.Size([values[s.value] if isinstance(s, SizeValue) else s for s in sizes])
                    )
                case SameAs(source):
                    flat.append(changed.get(source, leaves[source]))
        value = pytree.tree_unflatten(flat, self.joint.out_spec)
        return ProgramResult(value, updates, gradients)
