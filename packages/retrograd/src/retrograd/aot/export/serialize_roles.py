"""The signature of a joint graph as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd.graph.joint import (
    BackwardStep,
    Boundary,
    Cotangent,
    Destination,
    Gradient,
    JointSignature,
    Output,
    Primal,
    PrimalKind,
    Region,
)


def written_signature(signature: JointSignature) -> dict[str, Any]:
    """All roles and the structure."""
    return {
        "inputs": [_written_input(role) for role in signature.inputs],
        "outputs": [
            [role.region, written_destination(role.of)] if isinstance(role, Gradient) else [role.index]
            for role in signature.outputs
        ],
        "boundaries": [[boundary.value, boundary.is_visible] for boundary in signature.boundaries],
        "regions": [
            [list(region.roots), [written_destination(of) for of in region.destinations]]
            for region in signature.regions
        ],
        "order": [[step.index, step.is_leaf] for step in signature.order],
    }


def _written_input(role: Primal | Cotangent) -> list[Any]:
    return [role.index, role.name, role.kind.value] if isinstance(role, Primal) else [role.boundary]


def written_destination(of: Destination) -> list[Any]:
    """Number, and whether it is a boundary."""
    return [of.index, of.is_boundary]


def read_destination(written: Any) -> Destination:
    """What `written_destination` wrote."""
    index, is_boundary = written
    return Destination(index, is_boundary)


def read_signature(written: Mapping[str, Any]) -> JointSignature:
    """What `written_signature` wrote.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that was written so.
    """
    return JointSignature(
        inputs=tuple(_read_input(*one) for one in written["inputs"]),
        outputs=tuple(
            Output(one[0]) if len(one) == 1 else Gradient(one[0], read_destination(one[1]))
            for one in written["outputs"]
        ),
        boundaries=tuple(Boundary(value, visible) for value, visible in written["boundaries"]),
        regions=tuple(
            Region(tuple(roots), tuple(map(read_destination, ends))) for roots, ends in written["regions"]
        ),
        order=tuple(BackwardStep(index, is_leaf) for index, is_leaf in written["order"]),
    )


def _read_input(index: int, name: str | None = None, kind: str | None = None) -> Primal | Cotangent:
    return Cotangent(index) if name is None else Primal(index, name, PrimalKind(kind))
