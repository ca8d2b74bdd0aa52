"""A compiled function at run time.

In: flat inputs. Out: what the captured function would return, with eager's autograd structure: one `RegionNode` per
region, put into the graph so that the engine runs them, and hands on gradients, in eager's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd._torch.ambient import autocast_off
from retrograd._torch.memory import common_base
from retrograd._torch.rng import generator_states
from retrograd._torch.versions import Versions
from retrograd._torch.wrappers import PLAIN, built, parts_of
from retrograd.aot.finish import Finish
from retrograd.aot.policies import draws_random_numbers
from retrograd.aot.region_node import Kept, RegionNode, carrying
from retrograd.aot.rerun import Call
from retrograd.aot.run_backward import RegionCode
from retrograd.backends.base import Boxed
from retrograd.graph.joint import Destination
from retrograd.graph.partition import Partition, SavedKind

__all__ = ["CompiledFunction"]


class CompiledFunction:
    """A function compiled by ``aot.compile``. Called with the flat inputs of its `CaptureState`.

    Attributes:
        partition: what it was made of.
    """

    def __init__(self, partition: Partition, code: Boxed, regions: Sequence[RegionCode]) -> None:
        self.partition = partition
        joint = partition.joint
        self._code, self._regions = code, regions
        self._joint = joint
        self._found = [primal.found for primal in joint.primals if primal.found is not None]
        self._plain = all(primal.wrapping is PLAIN for primal in joint.primals)
        self._direct = self._plan_primals()
        self._values = [value.wrapping for value in joint.values]
        self._plain_values = all(wrapping is PLAIN for wrapping in self._values)
        self._steps = self._plan_steps()
        self._value_at = self._places_of_values()
        self._finish = Finish(joint)
        self._draws = self._random_devices()
        self._repeatable = not any(update.value is not None or update.view for update in joint.updates)
        self._saved_by_region = [self._plan_saved(i) for i in range(len(regions))]

    def _plan_primals(self) -> list[int] | None:
        """By primal the source that it is, if all are sources."""
        count = len(self._joint.state.leaves)
        found = iter(range(count, count + len(self._found)))
        places = [
            primal.leaf if primal.leaf is not None else next(found) if primal.found is not None else None
            for primal in self._joint.primals
        ]
        return None if None in places else places  # type: ignore[return-value]

    def _plan_steps(self) -> list[tuple[int, bool]]:
        """What to make, first what runs last: (region, False), or (primal, True) for a leaf whose gradient has to
        wait for its turn. A gradient needs not wait if it is the first after the only region that makes it."""
        signature = self._joint.signature
        steps, before = [], None
        contributors: dict[int, int] = {}
        for region in signature.regions:
            for there in region.destinations:
                if not there.is_junction:
                    contributors[there.index] = contributors.get(there.index, 0) + 1
        for step in signature.order:
            if not step.is_leaf:
                steps.append((step.index, False))
            elif self._joint.primals[step.index].is_leaf:
                first = before is not None and not before.is_leaf
                makes = first and Destination(step.index) in signature.regions[before.index].destinations  # type: ignore[union-attr]
                if not (makes and contributors[step.index] == 1):
                    steps.append((step.index, True))
            if not step.is_leaf or self._joint.primals[step.index].is_leaf:
                before = step
        return steps[::-1]

    def _places_of_values(self) -> dict[int, int]:
        """By place among the forward's results, the plain value that it is."""
        roles = self._joint.signature.outputs[: self._joint.signature.forward_count]
        return {
            place: role.index  # type: ignore[union-attr]
            for place, role in enumerate(roles)
            if self._joint.values[role.index].wrapping is PLAIN  # type: ignore[union-attr]
        }

    def _random_devices(self) -> tuple[torch.device, ...]:
        """Devices whose generators the forward uses."""
        nodes = self._joint.gm.graph.nodes
        drawing = [node for node in nodes if draws_random_numbers(node) and not node.meta.get("is_backward")]
        return tuple({_device(node.meta["val"]) for node in drawing})

    def _plan_saved(self, region: int) -> list[tuple[SavedKind, int, bool, bool]]:
        partition = self.partition
        entries = [partition.saved[i] for i in partition.backwards[region].saved]
        return [(entry.kind, entry.place, entry.is_number, entry.by_eager) for entry in entries]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run on flat inputs."""
        sources = [*leaves, *self._found] if self._found else leaves
        primals = self._primals(sources)
        parts = list(primals) if self._plain else self._parts(primals)
        generators = generator_states(self._draws) if self._draws and self._regions else {}
        arguments = list(parts) if self._regions else parts
        with torch.no_grad(), autocast_off():
            results = self._code(arguments)
        count = self._joint.signature.forward_count
        values = results[:count] if self._plain_values else self._built(results)
        values = list(values)
        if self._joint.updates:
            self._finish.write_unseen(primals, values)
        if self._regions:
            again = []
            if self._repeatable:
                versions = Versions(dict(enumerate(primals)))
                again = [carrying(Call(sources, primals, versions, generators))]
            with torch.enable_grad():
                values = self._attached(primals, parts, results, values, again)
        outputs = self._finish(sources, values)
        return pytree.tree_unflatten(outputs, self._joint.out_spec)

    def _primals(self, sources: Sequence[Any]) -> list[Any]:
        if self._direct is not None:
            return [sources[i] for i in self._direct]
        found = iter(self._found)
        made = []
        for primal in self._joint.primals:
            if primal.group is not None:
                members = self._joint.state.aliases[primal.group].members
                made.append(common_base([sources[member.leaf] for member in members]))
            else:
                made.append(next(found) if primal.leaf is None else sources[primal.leaf])
        return made

    def _parts(self, primals: Sequence[Any]) -> list[Any]:
        return [
            part
            for value, primal in zip(primals, self._joint.primals, strict=True)
            for part in parts_of(value, primal.wrapping)
        ]

    def _built(self, results: Sequence[Any]) -> list[Any]:
        flat = iter(results)
        return [built(wrapping, flat) for wrapping in self._values]

    def _attached(
        self,
        primals: Sequence[Any],
        parts: Sequence[Any],
        results: Sequence[Any],
        values: list[Any],
        again: Sequence[torch.Tensor],
    ) -> list[Any]:
        """The forward values, with eager's history."""
        gates = dict(enumerate(primals))
        junctions = self._joint.signature.junctions
        for index, is_gate in self._steps:
            if is_gate:
                gates[index] = primals[index][...]
                continue
            region = self._regions[index]
            saved, numbers = self._saved(index, parts, results, values)
            inputs = [
                values[junctions[there.index].value] if there.is_junction else gates[there.index]
                for there in region.destinations
            ]
            roots = [junctions[root].value for root in region.roots]
            bare = tuple(_fresh(values[root]) for root in roots)
            attached = RegionNode.apply(region, [*saved, *again], Kept(numbers, len(saved)), bare, *inputs)
            for root, value in zip(roots, attached, strict=True):  # type: ignore[arg-type]
                values[root] = value
                self._finish.write(root, primals, values)
        return values

    def _saved(
        self, region: int, parts: Sequence[Any], results: Sequence[Any], values: Sequence[Any]
    ) -> tuple[list[Any], dict[int, Any]]:
        saved, numbers = [], {}
        for i, (kind, place, is_number, by_eager) in enumerate(self._saved_by_region[region]):
            if by_eager and kind is SavedKind.OUTPUT and place in self._value_at:
                value = values[self._value_at[place]]  # as it is now: written into a primal, with its history
            else:
                value = (parts if kind is SavedKind.PRIMAL else results)[place]
            if is_number:
                numbers[i] = value
            else:
                saved.append(value)
        return saved, numbers


def _fresh(value: torch.Tensor) -> torch.Tensor:
    """A value that may become the output of a node: no view of something that nobody sees."""
    return value.detach() if value._is_view() else value


def _device(value: Any) -> torch.device:
    while isinstance(value, (tuple, list)):
        value = value[0]
    device: torch.device = value.device
    return device
