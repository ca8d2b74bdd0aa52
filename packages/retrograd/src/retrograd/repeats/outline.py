"""Extracts subgraphs in a form that makes equal subgraphs compare equal.

In: consecutive calls of a graph (a run). Out: an `Outline`: the run's inputs, in the order of their first
uses; its outputs, in the order of their calls; and a key. Runs with equal keys may share code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd.graph.fx import (
    add_copy,
    has_effect,
    is_collective,
    is_higher_order,
    is_random,
    is_wait,
    is_write_to_input,
    lazy_graph_module,
    operands_of,
)
from retrograd.graph.structure import token_of

#: bytes. A code generator may assume that an input's address is a multiple of this.
_ALIGNMENT = 16


class Outline:
    """A run of calls with its inputs and outputs.

    Args:
        calls: the nodes.
        known: the tokens and operands of all calls of the graph.
        results: by result of the graph, whether it must have its traced strides.
        key_of: returns the part of the key for an input.

    Attributes:
        calls: the nodes.
        inputs: nodes outside the run that it reads.
        outputs: nodes of the run that other calls read, or that are results.
        pinned: how many of the first outputs must have their traced strides. These are read by calls of other
            runs, or are results of the graph that must have them.
        key: outlines with equal keys compute the same from inputs with equal metadata.
    """

    def __init__(
        self,
        calls: Sequence[fx.Node],
        known: Mapping[fx.Node, TokenisedCall],
        results: Mapping[fx.Node, bool],
        key_of: Callable[[fx.Node], Hashable],
    ) -> None:
        inside: dict[fx.Node, int] = {node: i for i, node in enumerate(calls)}
        inputs: dict[fx.Node, int] = {}
        body = []
        for node in calls:
            call = known[node]
            places = []
            for operand in call.operands:
                if operand in inside:
                    places.append(inside[operand])
                elif not holds_graph(operand):
                    places.append(-1 - inputs.setdefault(operand, len(inputs)))
            body.append((call.token, tuple(places)))
        pinned, free = [], []
        for node in calls:
            if results.get(node) or any(user not in inside and user.op != "output" for user in node.users):
                pinned.append(node)
            elif node in results:
                free.append(node)
        self.calls, self.inputs, self.outputs, self.pinned = calls, [*inputs], [*pinned, *free], len(pinned)
        border = tuple([inside[node] for node in self.outputs]), self.pinned
        self.key: Hashable = (tuple(body), tuple(map(key_of, inputs)), border)


def outlines(
    runs: Sequence[Sequence[fx.Node]],
    known: Mapping[fx.Node, TokenisedCall],
    results: Mapping[fx.Node, bool],
) -> list[Outline]:
    """The outlines of all runs of an ATen graph; see `Outline`."""
    return [Outline(calls, known, results, _input) for calls in runs]


def holds_graph(node: fx.Node) -> bool:
    """Whether the node refers to a graph: the argument of a higher-order operator."""
    if node.op != "get_attr":
        return False
    owner = node.graph.owning_module
    return isinstance(operator.attrgetter(str(node.target))(owner), torch.nn.Module)


def _input(node: fx.Node) -> Hashable:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return metadata_of(value)
    offset = value.storage_offset()
    is_aligned = offset * value.element_size() % _ALIGNMENT == 0 if type(offset) is int else str(offset)
    return metadata_of(value), is_aligned


def graph_of(gm: fx.GraphModule, part: Outline, sizes: Sequence[torch.SymInt]) -> fx.GraphModule:
    """The run as a separate graph module.

    Args:
        gm: the graph that contains the run.
        part: the run.
        sizes: symbols that are not sizes of its inputs. Each becomes an extra input, after the others.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def copied(node: fx.Node) -> fx.Node:
        if node not in made:  # a graph for a higher-order operator
            made[node] = add_copy(graph, node, copied)
        return made[node]

    for i, node in enumerate(part.inputs):
        made[node] = graph.placeholder(f"in_{i}")
        made[node].meta = {"val": node.meta["val"]}
    for i, size in enumerate(sizes):
        graph.placeholder(f"size_{i}").meta = {"val": size}
    for node in part.calls:
        made[node] = add_copy(graph, node, copied)
    graph.output(tuple([made[node] for node in part.outputs]))
    return lazy_graph_module(gm, graph)


#: the user's annotations in ``node.meta``, which a code generator may read.
_NOTES = "custom"


@dataclass(frozen=True)
class TokenisedCall:
    """One call.

    Attributes:
        token: equal for calls that compute the same from operands with equal metadata.
        operands: the values that it reads, one for each use.
    """

    token: Hashable
    operands: tuple[fx.Node, ...]


def tokenised(node: fx.Node) -> TokenisedCall:
    """The token and operands of a ``call_function`` node.

    Some calls equal only themselves: calls with effects other than drawing random numbers or writing to an
    input, higher-order operators, collectives, and convolutions whose memory format is open.
    """
    value = node.meta.get("val")
    if not _may_repeat(node) or value is None:
        return TokenisedCall((node,), operands_of(node))
    notes = repr(node.meta[_NOTES]) if _NOTES in node.meta else None
    return TokenisedCall((token_of(node), metadata_of(value), notes), operands_of(node))


def _may_repeat(node: fx.Node) -> bool:
    if is_higher_order(node.target) or is_collective(node) or is_wait(node) or _is_laid_out_freely(node):
        return False
    return is_random(node) or is_write_to_input(node) or not has_effect(node)


def _is_laid_out_freely(node: fx.Node) -> bool:
    """Whether the call is a convolution whose memory format a code generator may change. It does so for a
    whole graph, so each border would convert between formats."""
    if node.target is not torch.ops.aten.convolution.default:
        return False
    value: Any = node.meta.get("val")
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim() if value is not None else 0)
    return last is not None and not value.is_contiguous(memory_format=last)


def metadata_of(value: Any) -> Hashable:
    """Type, layout and sizes of an example value. Symbolic sizes appear as their expressions."""
    if isinstance(value, torch.Tensor):
        numbers = _numbers(value.shape), _numbers(value.stride())
        return value.dtype, value.device, *numbers, value.is_conj(), value.is_neg()
    if isinstance(value, (tuple, list)):
        return ("items", *map(metadata_of, value))
    return type(value), str(value)


def _numbers(sizes: Any) -> tuple[Hashable, ...]:
    return tuple([size if type(size) is int else str(size) for size in sizes])
