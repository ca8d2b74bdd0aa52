"""Compares cotangents with those that were traced, and traces a region for other layouts.

In: a partition and a root of a region. Out: `ExpectedTangent`, which says whether an arriving cotangent is of
the traced kind, and in which layout; and for another layout, a graph that replaces the region's graph.
Backward formulas read a cotangent's strides (``grad.contiguous()``), so a graph traced for one layout is
wrong for another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from retrograd.aot.extraction import extract, finished_backward, gradients_of, is_backward, needed_between
from retrograd.aot.joint_capture import capture_divided
from retrograd.errors import RetrogradError
from retrograd.graph.fx import has_effect, is_symbolic
from retrograd.graph.joint import cotangent_name, cotangents_reaching
from retrograd.graph.joint_graph import JointValues, Partition
from retrograd.graph.structure import token_of
from retrograd.runtime.modes import Autocast
from retrograd.runtime.subclass import PLAIN, SubclassSpec, fits, parts_of
from retrograd.runtime.tensor import is_batched, is_not_in_memory
from retrograd.trace import guard_count, hint_of

Strides = tuple[Any, ...]


class ExpectedTangent:
    """Metadata of the cotangent that region `region` expects at the boundary `root`, from the trace.

    Attributes:
        wrapping, parts: the structure of a wrapper subclass, and its plain tensors.
        is_plain: whether it is not a wrapper subclass.
        is_static: whether it is a plain tensor without symbolic sizes.
    """

    def __init__(self, partition: Partition, region: int, root: int) -> None:
        joint = partition.joint
        self.wrapping: SubclassSpec = joint.values[joint.signature.boundaries[root].value].wrapping
        summary = partition.backwards[region].graph.summary
        fakes = dict(zip(summary.names, summary.inputs, strict=True))
        count = self.wrapping.count
        names = [cotangent_name(root, part, count) for part in range(count)]
        self.parts: list[torch.Tensor] = [fakes[name] for name in names]
        self.is_plain = self.wrapping is PLAIN
        self.is_static = self.is_plain and not is_symbolic(self.parts[0])

    def fits(self, cotangent: torch.Tensor | None) -> bool:
        """Whether a cotangent, or each row of a batch (``is_grads_batched``), is of the traced kind, in any
        layout."""
        if cotangent is None:
            return self.is_static
        if self.is_plain and is_batched(cotangent):
            return cotangent.dtype is self.parts[0].dtype
        return fits(self.wrapping, cotangent) and all(
            map(_is_ordinary, parts_of(cotangent, self.wrapping), self.parts)
        )

    def layout(self, cotangent: torch.Tensor | None) -> Strides | None:
        """The strides of a cotangent, or of a subclass's parts; None if they are those of the trace."""
        if cotangent is None:
            return None
        if self.is_plain:
            return _strides(cotangent, self.parts[0])
        found = tuple(map(_strides, parts_of(cotangent, self.wrapping), self.parts))
        return found if any(found) else None

    def laid_out(self, cotangent: torch.Tensor | None) -> Sequence[Any]:
        """The plain tensors of a cotangent, in the traced layout; zeros if it is undefined."""
        if cotangent is None:
            like = self.parts[0]
            zeros = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            return [zeros.zero_()]
        return list(map(_laid_out, parts_of(cotangent, self.wrapping), self.parts))


def _laid_out(value: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    if _strides(value, fake) is None:
        return value
    strides = _dense_strides(value.shape, fake)
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _is_ordinary(value: torch.Tensor, fake: torch.Tensor) -> bool:
    """Whether it is a strided tensor of the traced dtype, with its elements in memory."""
    return value.layout is torch.strided and value.dtype is fake.dtype and not is_not_in_memory(value)


def _strides(value: torch.Tensor, fake: torch.Tensor) -> Strides | None:
    """The strides of `value`; None if they are those of `fake`."""
    strides = value.stride()
    if 0 in value.shape or (not is_symbolic(fake) and strides == fake.stride()):
        return None
    triples = zip(value.shape, strides, _dense_strides(value.shape, fake), strict=True)
    return None if all(size == 1 or one == other for size, one, other in triples) else strides


def _dense_strides(shape: Sequence[int], fake: torch.Tensor) -> list[int]:
    """Dense strides for `shape`, in the dimension order of `fake`, which is dense."""
    hints = [hint_of(stride) for stride in fake.stride()]
    order = sorted(range(len(shape)), key=lambda dim: (math.inf if hints[dim] is None else hints[dim], -dim))
    strides, count = [0] * len(shape), 1
    for dim in order:
        strides[dim] = count
        count *= max(shape[dim], 1)
    return strides


def traced_for(
    partition: Partition,
    number: int,
    layouts: Mapping[int, Strides],
    autocast: Autocast,
) -> fx.GraphModule | None:
    """The backward of region `number` under `autocast`, for cotangents with these strides (by boundary). None
    if it cannot be traced for them."""
    state, before = partition.joint.state, guard_count(partition.joint.state.fake_mode)
    try:
        options = replace(partition.joint.options, layouts=layouts, autocast=autocast)
        joint, _ = capture_divided(state, options)
    except RetrogradError:
        return None
    if guard_count(state.fake_mode) != before or not _is_alike(partition.joint, joint, number):
        return None  # a guard that nobody would check, or a different program
    return _cut_out(partition, joint, number)


def _is_alike(before: JointValues, now: JointValues, number: int) -> bool:
    one, other = (
        {there: wrapping for (region, there), wrapping in joint.gradients.items() if region == number}
        for joint in (before, now)
    )
    return before.signature.regions == now.signature.regions and one == other


def _cut_out(partition: Partition, joint: JointValues, number: int) -> fx.GraphModule | None:
    graph, taken = joint.gm.graph, partition.backwards[number].graph.summary.names
    tokens: dict[Hashable, int] = {}
    numbers = {node.name: number for number, node in _of_forward(partition.joint, tokens).items()}
    calls = _of_forward(joint, tokens)
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    found = [inputs.get(name) or calls.get(numbers.get(name, -1)) for name in taken]
    given = [node for node in found if node is not None]
    if len(given) < len(found):
        return None
    wanted = gradients_of(joint, number)
    inside = needed_between(given, wanted)
    if any(node.op == "placeholder" or (has_effect(node) and not is_backward(node)) for node in inside):
        return None  # it reads a value that was not saved, or would draw new random numbers
    effects = [n for n in graph.nodes if is_backward(n) and n.meta["region"] == number and has_effect(n)]
    return finished_backward(extract(joint.gm, given, wanted, f"backward_{number}", also=effects))


def _of_forward(joint: JointValues, tokens: dict[Hashable, int]) -> dict[int, fx.Node]:
    """The values that depend on no cotangent, by a number that is equal in two joint graphs if the values are
    computed alike. We cannot match by name: another cotangent may put other calls in between.

    Args:
        joint: the graph.
        tokens: the numbers assigned so far, for both graphs.
    """
    reaching = cotangents_reaching(joint.gm.graph, joint.signature)
    found, places, counts = dict[int, fx.Node](), dict[fx.Node, bytes](), Counter[Hashable]()
    for node in joint.gm.graph.nodes:
        if reaching[node] or node.op == "output":
            continue
        token = token_of(node, places)
        number = tokens.setdefault((token, counts[token]), len(tokens))
        counts[token] += 1
        found[number], places[node] = node, b"%d" % number
    return found
