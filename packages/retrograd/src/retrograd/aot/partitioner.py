"""Third stage: a `JointGraph` becomes a `Partition`.

In: a joint graph and a policy: torch's minimum cut, save everything, recompute everything, or the user's own
partitioner. Out: a forward graph, a backward graph for each region, and the list of saved values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from retrograd.aot.droppable import released
from retrograd.aot.extraction import (
    Memory,
    backward_nodes,
    copied_call,
    extract,
    finished_backward,
    finished_forward,
    gradients_of,
    is_backward,
    is_number,
    needed_between,
    overwritten_unread,
    read_by_backward,
)
from retrograd.aot.save_policy import choose_saved
from retrograd.backends.base import Backend
from retrograd.config import ALLOWED, Policy, checked
from retrograd.errors import VerificationError
from retrograd.graph.fx import (
    KEPT_FOR,
    add_call,
    copied_module,
    draws_random_numbers,
    has_effect,
    is_mutating,
    lazy_graph,
)
from retrograd.graph.joint import Cotangent, output_values
from retrograd.graph.joint_graph import JointValues, Partition, RegionBackward, Saved, SavedKind
from retrograd.graph.reach import reached
from retrograd.trace import places_of_symbols, symbols_in


@checked(joint=(JointValues, "what aot.capture or aot.load returned"), policy=ALLOWED["partitioner"])
def partition(joint: JointValues, policy: Policy = "min_cut") -> Partition:
    """Divide `joint` into forward and backward graphs.

    Args:
        joint: from ``capture``, perhaps changed by passes.
        policy: what to save. ``"min_cut"``: torch's minimum cut, which recomputes cheap values.
            ``"save_all"``: what eager saves. ``"recompute_all"``: only inputs. Or a callable with the
            signature of torch's partitioners. A ``torch.utils.checkpoint.CheckpointPolicy`` in a node's
            ``meta["recompute"]`` is honoured.

    Raises:
        VerificationError: a backward would read a value that is not saved, or an effect would happen twice.
    """
    return partition_for(Backend(), joint, policy)


def partition_for(backend: Backend, joint: JointValues, policy: Policy) -> Partition:
    """Like `partition`, for halves that `backend` compiles, which may have random numbers of its own."""
    copy = replace(joint, gm=copied_module(joint.gm))  # We change the copy.
    memory = Memory(copy.gm, copy.signature)
    chosen = choose_saved(copy, memory, policy)
    copies = frozenset(node for node in chosen if policy == "min_cut" and memory.is_forbidden(node))
    reread = frozenset(filter(memory.is_reread, () if policy == "recompute_all" else memory.primals))
    result = _Division(copy, memory, chosen, copies, reread, backend).partition()
    unread = overwritten_unread(joint) if joint.updates and joint.signature.regions else ()
    let_go = released(joint, result.saved, result.backwards)
    return replace(result, joint=joint, overwritten=frozenset(unread), released=let_go)


@dataclass
class _Division:
    joint: JointValues
    memory: Memory
    chosen: set[fx.Node]
    copies: frozenset[fx.Node]
    reread: frozenset[fx.Node]
    backend: Backend
    instead: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sizes: dict[tuple[int, int], fx.Node] = field(default_factory=dict)

    def partition(self) -> Partition:
        gm, signature = self.joint.gm, self.joint.signature
        inputs, count = gm.graph.find_nodes(op="placeholder"), len(signature.primals)
        self.primals, self.cotangents = inputs[:count], inputs[count:]
        self.forward_results = list(output_values(gm.graph)[: signature.forward_count])
        changed = {update.primal for update in self.joint.updates}
        roles = zip(self.primals, signature.primals, strict=True)
        self.changed = {node for node, role in roles if role.index in changed}
        wanted = [gradients_of(self.joint, number) for number in range(len(signature.regions))]
        self._replay_random_numbers([node for nodes in wanted for node in nodes])
        reads = [
            self._with_symbols(self._read(nodes), self._cotangents_of(number))
            for number, nodes in enumerate(wanted)
        ]
        saved = [node for node in gm.graph.nodes if any(node in read for read in reads)]
        forward, described = self._forward(saved)
        backwards = tuple(
            self._backward(number, [n for n in saved if n in read], saved, nodes)
            for number, (read, nodes) in enumerate(zip(reads, wanted, strict=True))
        )
        return Partition(self.joint, lazy_graph(forward), described, backwards)

    def _read(self, wanted: Sequence[Any]) -> set[fx.Node]:
        """The saved nodes that a region reads. Numbers are always saved, never recomputed."""
        border, cotangents = self.chosen | set(self.primals), set(self.cotangents)

        def is_saved(node: fx.Node) -> bool:
            return node in border or (is_number(node) and not is_backward(node) and node not in cotangents)

        def computed_of(node: fx.Node) -> Sequence[fx.Node]:
            if node in cotangents or is_saved(node):
                return ()
            if is_mutating(node) and not is_backward(node):
                raise VerificationError.because(
                    "partition-law",
                    f"{node.target} changes something in place and would run again in the backward",
                    "aot.partition",
                    node=node.name,
                    way_out="mark it CheckpointPolicy.MUST_SAVE in node.meta['recompute']",
                )
            return self.instead.get(node, node).all_input_nodes

        found = reached((node for node in wanted if isinstance(node, fx.Node)), computed_of)
        return set(filter(is_saved, found))

    def _with_symbols(self, read: set[fx.Node], cotangents: Sequence[fx.Node]) -> set[fx.Node]:
        """`read`, plus a number for each symbol that occurs in it only inside an expression, such as
        ``s0 + 1``. Code generators read a symbol only from an input or size that is just that symbol, and the
        symbols of a number only from other numbers."""
        given = [node.meta.get("val") for node in (*read, *cotangents)]
        missing = set[str]()
        for values in given, [value for value in given if not isinstance(value, torch.Tensor)]:
            missing |= frozenset[str]().union(*map(symbols_in, values)) - places_of_symbols(values).keys()
        places = places_of_symbols([node.meta.get("val") for node in self.primals]) if missing else {}
        return read | {self._number(*places[symbol]) for symbol in sorted(missing) if symbol in places}

    def _number(self, primal: int, dim: int | None) -> fx.Node:
        """A primal that is a number, or one size of a tensor primal."""
        node = self.primals[primal]
        if dim is None:
            return node
        size = self.sizes.get((primal, dim))
        if size is None:
            with self.joint.gm.graph.inserting_before(self.cotangents[-1].next):
                size = add_call(self.joint.gm.graph, torch.ops.aten.sym_size.int, (node, dim))
            size.meta["val"] = node.meta["val"].shape[dim]
            self.sizes[primal, dim] = size
        return size

    def _replay_random_numbers(self, wanted: Sequence[Any]) -> None:
        """Make the backward read or compute the random numbers that the forward drew."""
        recomputed = needed_between(self.chosen | set(self.primals) | set(self.cotangents), wanted)
        for node in list(self.joint.gm.graph.nodes):
            if node in recomputed and draws_random_numbers(node) and not is_backward(node):
                found = self.backend.redraw(self.joint.gm.graph, node)
                if found is None:
                    is_one = isinstance(node.meta["val"], torch.Tensor)
                    kept = {node} if is_one else recomputed.intersection(node.users)
                    self.copies |= frozenset(filter(self.memory.is_forbidden, kept))
                    self.chosen |= kept
                else:
                    state, value, redrawn = found
                    self.instead[value] = redrawn
                    self.chosen.add(state)
        if self.instead:
            self.memory = Memory(self.joint.gm, self.joint.signature)

    def _forward(self, saved: Sequence[fx.Node]) -> tuple[fx.GraphModule, tuple[Saved, ...]]:
        graph = self.joint.gm.graph
        results = self._own_memory()
        extra: list[fx.Node] = []
        described = []
        taken = self.memory.of(*self.memory.primals, *self.memory.outputs)
        places = {
            node: place for place, node in reversed(list(enumerate(results))) if isinstance(node, fx.Node)
        }
        for node in saved:
            owners = self.memory.of(node)
            by_eager = not owners.isdisjoint(self.memory.kept_by_eager)
            value = node.meta.get("val")
            is_copy = node in self.copies
            if node in self.memory.primals and node not in self.changed and not is_copy:
                kind, place, is_view = SavedKind.PRIMAL, self.memory.primals[node], False
            elif node in places and not is_copy:
                kind, place, is_view = SavedKind.OUTPUT, places[node], False
            else:
                kind, place = SavedKind.INTERMEDIATE, len(results) + len(extra)
                is_own = is_copy or not owners.isdisjoint(self.changed)
                if node in places:
                    results[places[node]] = copied_call(node)
                extra.append(copied_call(node) if is_own and node not in places else node)
                is_view = not (is_own or taken.isdisjoint(owners))
                taken |= owners
            reread = kind is SavedKind.PRIMAL and node in self.reread
            described.append(Saved(node.name, kind, place, value, by_eager, is_view, reread))
        effects = [node for node in graph.nodes if not is_backward(node) and has_effect(node)]
        forward = extract(self.joint.gm, self.primals, [*results, *extra], "forward", also=effects)
        return finished_forward(forward, len(results)), tuple(described)

    def _own_memory(self) -> list[Any]:
        """The forward results. A result that shares memory with a primal or an earlier result is a copy."""
        taken = self.memory.of(*self.primals)
        results = list(self.forward_results)
        for place, node in enumerate(results):
            if isinstance(node, fx.Node) and not is_number(node):
                owners = self.memory.of(node)
                if not taken.isdisjoint(owners):
                    results[place] = copied_call(node)
                taken |= owners
        return results

    def _backward(
        self, number: int, read: list[fx.Node], saved: Sequence[fx.Node], wanted: Sequence[Any]
    ) -> RegionBackward:
        cotangents = self._cotangents_of(number)
        effects = [node for node in backward_nodes(self.joint.gm, number) if has_effect(node)]
        try:
            gm = extract(
                self.joint.gm, [*read, *cotangents], wanted, f"backward_{number}", self.instead, effects
            )
        except KeyError as missing:
            raise VerificationError.because(
                "partition-law",
                f"the backward of region {number} reads {missing}, "
                "which is neither saved nor its own cotangent",
                "aot.partition",
                node=str(missing),
                way_out="a pass has mixed regions: let each region's gradients depend on its own "
                "cotangents only",
            ) from missing
        order = {node: i for i, node in enumerate(saved)}
        return RegionBackward(
            lazy_graph(finished_backward(gm)),
            tuple(order[node] for node in read),
            self._checked(number, read),
        )

    def _cotangents_of(self, number: int) -> list[fx.Node]:
        roots = set(self.joint.signature.regions[number].roots)
        roles = self.joint.signature.inputs[len(self.primals) :]
        return [
            node
            for node, role in zip(self.cotangents, roles, strict=True)
            if isinstance(role, Cotangent) and role.boundary in roots
        ]

    def _checked(self, number: int, read: list[fx.Node]) -> tuple[Saved, ...]:
        """The tensors that eager saves for a region and the user can overwrite, if we do not save them
        themselves."""
        memory = self.memory
        visible = {*memory.primals, *memory.outputs}
        owners = memory.of(*read_by_backward(self.joint.gm, number))
        kept = {owner for owner in owners if owner in memory.kept_by_eager and not is_number(owner)}
        kept |= {one for one in memory.of(*visible) if number in one.meta.get(KEPT_FOR, ())}
        covered = memory.of(*(node for node in read if node in visible and node not in self.copies))
        checked = []
        for owner in self.joint.gm.graph.nodes:  # sets have another order in each process
            if owner not in kept or owner in covered or owner in self.changed:
                continue
            example = owner.meta.get("val")
            if owner in memory.primals:
                checked.append(Saved(owner.name, SavedKind.PRIMAL, memory.primals[owner], example, True))
            for output, place in memory.outputs.items():
                if owner in memory.of(output) and owner not in memory.primals:
                    checked.append(Saved(output.name, SavedKind.OUTPUT, place, example, True))
        return tuple(checked)
