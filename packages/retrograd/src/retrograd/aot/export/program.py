"""An exported program: a frozen value that can be called, saved, and compiled.

In: made by ``aot.export`` and ``aot.load``. Out: results, new values of buffers, and gradients, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from retrograd._torch import pytree
from retrograd._torch.state import autocast_off
from retrograd.aot.export.input_check import InputFit, refused
from retrograd.aot.joint import JointGraph
from retrograd.graph.joint_graph import ComputedOutput, ConstantOutput, SameAs, SizeOutput, SizeValue
from retrograd.graph.program import GradientOf, NewValue, ProgramKind, ProgramSignature, Result


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
    fit: InputFit = field(repr=False)
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
        values = iter(self.fit.checked(inputs))
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
            ExportError: the arguments are built otherwise than at capture, an entry of `state` is missing, or
                the program is a joint graph, which takes cotangents.
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
            _refuse_other_constant(leaf, value)
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


def _refuse_other_constant(leaf: Any, value: Any) -> None:
    if leaf.kind is None and not (type(value) is type(leaf.value) and value == leaf.value):
        text = f"{leaf.name} is {value!r}, and was the constant {leaf.value!r} at capture"
        raise refused("constant", text, leaf.name, "give the same constant, or capture again")
