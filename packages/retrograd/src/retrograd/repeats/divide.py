"""Divide a sequence of calls where it repeats itself, so that each kind of part is compiled once.

In: an ATen graph, or a run of calls of a `BackwardGraph` in eager's order. Out: the same calls as consecutive
parts: the copies of what repeats, and what stands before, between and after them. Of an ATen graph these are
outlines, and those that repeat have a key that another has too.

Time grows with the number of calls, not with its square: periods are read off the distances at which short
runs of calls come again, and only the most frequent few are tried.

A value that crosses a border is written to memory and read again. Matrix products, convolutions and the like
write what they give in any case, and read what they take; results of the whole graph are written too. Views
cost nothing beyond the value that they show. Nothing but tensors and sizes can cross.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import aliased_inputs, depends_on_data
from retrograd._torch.trace import bytes_of
from retrograd.graph.backward_graph import CallKind, call_of
from retrograd.graph.structure import token_of
from retrograd.repeats.outline import Outline, TokenisedCall, holds_graph, outlines, tokenised

#: how many calls are compared together when periods are looked for: enough to tell the places in a layer
#: apart, and fewer than the calls of any layer that is worth a period of its own.
_GRAM = 6

#: how many periods are tried on one stretch of calls.
_TRIED = 6


@dataclass(frozen=True)
class Repeat:
    """`count` times the same `length` calls, one after the other, from `start` on."""

    start: int
    length: int
    count: int

    @property
    def stop(self) -> int:
        """Where the last copy ends."""
        return self.start + self.length * self.count

    def cuts(self) -> range:
        """Where the copies begin, and where the last one ends."""
        return range(self.start, self.stop + 1, self.length)


def find_repeats(
    tokens: Sequence[Hashable], costs: Sequence[float | None], least: int, copies: int = 2
) -> list[Repeat]:
    """The repeats of a sequence, in order.

    Args:
        tokens: one per call.
        costs: what a cut before each call costs, and one after the last (None: no cut is possible there). Of
            all ways to divide a repeat into copies, the one whose cuts are cheapest is taken.
        least: calls that a copy must have; short periods are taken several at a time.
        copies: how many copies a repeat must have, two or more.
    """
    numbers: dict[Hashable, int] = {}
    interned = [numbers.setdefault(token, len(numbers)) for token in tokens]
    found: list[Repeat] = []
    pending = [(0, len(interned))]
    while pending:
        start, stop = pending.pop()
        if stop - start < copies * least:
            continue
        possible = _repeats_within(interned, costs, least, start, stop)
        repeat = max(
            (each for each in possible if each.count >= copies),
            key=lambda each: (each.length * (each.count - 1), -each.length),
            default=None,
        )
        if repeat is not None:
            found.append(repeat)
            pending += [(start, repeat.start), (repeat.stop, stop)]
    return sorted(found, key=lambda each: each.start)


def _repeats_within(
    tokens: Sequence[int], costs: Sequence[float | None], least: int, start: int, stop: int
) -> Iterator[Repeat]:
    """For every period that is tried, the best division of every stretch in which it holds."""
    for period in _periods(tokens, start, stop):
        for first, last in _stretches(tokens, period, start, stop):
            length = period * -(-least // period)
            repeat = _divided(costs, first, last, period, length)
            if repeat is not None:
                yield repeat


def _periods(tokens: Sequence[int], start: int, stop: int) -> list[int]:
    """Distances at which the same few tokens come again, the most frequent first."""
    seen: dict[tuple[int, ...], int] = {}
    votes: Counter[int] = Counter()
    for i in range(start, stop - _GRAM + 1):
        gram = tuple(tokens[i : i + _GRAM])
        if gram in seen:
            votes[i - seen[gram]] += 1
        seen[gram] = i
    return [period for period, _ in votes.most_common(_TRIED)]


def _stretches(tokens: Sequence[int], period: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where every token equals the one a period later, for at least one period."""
    first = start
    for i in range(start, stop - period + 1):
        if i == stop - period or tokens[i] != tokens[i + period]:
            if i - first >= period:
                yield first, i + period
            first = i + 1


def _divided(costs: Sequence[float | None], first: int, last: int, period: int, length: int) -> Repeat | None:
    """Copies of `length` between `first` and `last`, cut where that is cheapest; then as many as possible."""
    best: tuple[tuple[float, int], Repeat] | None = None
    for start in range(first, min(first + period, last)):
        count = (last - start) // length
        if count < 2:
            break
        repeat = Repeat(start, length, count)
        prices = [costs[cut] for cut in repeat.cuts()]
        if any(price is None for price in prices):
            continue
        inner = prices[1:-1]
        rank = (sum(inner) / len(inner), last - first - count * length)  # type: ignore[arg-type]
        if best is None or rank < best[0]:
            best = rank, repeat
    return best[1] if best is not None else None


def boundary_costs(count: int, uses: Sequence[tuple[int, int, float | None]]) -> list[float | None]:
    """What a cut before each of `count` calls costs, and one after the last.

    Args:
        uses: for each value that is used later on: the place of the call that makes it, the place of the last
            call that uses it, and what it costs to hand it over (None: that is not possible).
    """
    change, forbidden = [0.0] * (count + 2), [0] * (count + 2)
    for made, used, cost in uses:
        if cost is None:
            forbidden[made + 1] += 1
            forbidden[used + 1] -= 1
        else:
            change[made + 1] += cost
            change[used + 1] -= cost
    costs: list[float | None] = []
    price, closed = 0.0, 0
    for i in range(count + 1):
        price += change[i]
        closed += forbidden[i]
        costs.append(None if closed else price)
    return costs


_OPS = frozenset({"placeholder", "get_attr", "call_function", "output"})


def divided(graph: fx.Graph, least: int, visible: int | None, copies: int = 2) -> list[Outline]:
    """The parts of `graph`, in order; none if nothing in it repeats itself."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if len(calls) < 2 * least or not _can_be_divided(graph):
        return []
    known = {node: tokenised(node) for node in calls}
    repeats = find_repeats([known[node].token for node in calls], border_costs(calls), least, copies)
    # Where nothing is computed, no code is shorter than that of as many views.
    repeats = [one for one in repeats if not all(map(aliased_inputs, calls[one.start : one.stop]))]
    if not repeats:
        return []
    parts = _united(_cut(calls, repeats), known, _results(graph, visible))
    return parts if len({part.key for part in parts}) < len(parts) else []


def _cut(calls: Sequence[fx.Node], repeats: Sequence[Repeat]) -> list[Sequence[fx.Node]]:
    """The copies of what repeats, and what stands before, between and after them."""
    cuts = sorted({0, len(calls), *(cut for repeat in repeats for cut in repeat.cuts())})
    return [calls[start:stop] for start, stop in itertools.pairwise(cuts)]


def _last_use(node: fx.Node, place: Mapping[fx.Node, int]) -> int:
    """The place of the last of the calls that reads a value; its own if none does."""
    return max((place[user] for user in node.users if user in place), default=place[node])


def _can_be_divided(graph: fx.Graph) -> bool:
    return not any(
        node.op not in _OPS
        or (node.op == "placeholder" and "val" not in node.meta)
        or (node.op == "get_attr" and "val" not in node.meta and not holds_graph(node))
        or (node.op == "call_function" and depends_on_data(node))
        for node in graph.nodes
    )


def _results(graph: fx.Graph, visible: int | None) -> Mapping[fx.Node, bool]:
    """By result, whether it must have its traced strides."""
    given: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    found: dict[fx.Node, bool] = {}
    for place, node in enumerate(given):
        if isinstance(node, fx.Node):
            found[node] = found.get(node, False) or place < (visible or 0)
    return found


def _united(
    runs: Sequence[Sequence[fx.Node]], known: Mapping[fx.Node, TokenisedCall], results: Mapping[fx.Node, bool]
) -> list[Outline]:
    """Outlines, neighbours that are like no other run taken together."""
    parts = outlines(runs, known, results)
    count = Counter(part.key for part in parts)
    united: list[Sequence[fx.Node]] = []
    pairs = zip(runs, (count[part.key] == 1 for part in parts), strict=True)
    for is_single, group in itertools.groupby(pairs, key=operator.itemgetter(1)):
        same = [run for run, _ in group]
        united += [[node for run in same for node in run]] if is_single else same
    return outlines(united, known, results) if len(united) < len(runs) else parts


#: what a byte costs that crosses a border: of a value that is written to memory and read from it in any case;
#: that is written in any case, but that the next call would have had in a register; that nothing else writes.
#: They are whole numbers, so that equal costs are equal.
_IN_MEMORY, _READ_AGAIN, _WRITTEN = 1, 10, 20

#: operators that are kernels of their own, with which nothing is fused.
_KERNELS = re.compile(r"mm$|^convolution|attention|^embedding_dense|^sort|^topk|scatter|^index_put|_fft")
#: operators that read sizes and a dtype of their argument, and no element.
_READ_NO_ELEMENT = re.compile(r"_like$|^new_")


def border_costs(calls: Sequence[fx.Node]) -> list[float | None]:
    """What a border before each call costs, and one after the last; None where there can be none."""
    place = {node: i for i, node in enumerate(calls)}
    levels = _levels(calls)
    owners: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    shown: dict[fx.Node, list[fx.Node]] = {}
    uses: list[tuple[int, int, float | None]] = []
    for i, node in enumerate(calls):
        owners[node] = owner = _owner(node, owners)
        shown.setdefault(owner, []).append(node)
        used = _last_use(node, place)
        last[owner] = max(last.get(owner, i), used)
        if used > i and not _can_cross(node):
            uses.append((i, used, None))
    for owner, views in shown.items():
        if owner not in place or last[owner] == place[owner]:
            continue
        size = _bytes(owner.meta.get("val"))
        uses.append((place[owner], last[owner], _IN_MEMORY * size))
        if fused := _fused(owner, views, levels):
            is_written = len(fused) < len(_readers(views))
            extra = (_READ_AGAIN if is_written else _WRITTEN) - _IN_MEMORY
            uses.append((place[owner], max(place[node] for node in fused), extra * size))
    return boundary_costs(len(calls), uses)


def _owner(node: fx.Node, owners: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node whose memory the value shows."""
    if node.target is operator.getitem and not isinstance(node.args[0].meta.get("val"), torch.Tensor):  # type: ignore[union-attr]
        bases = aliased_inputs(node.args[0])  # type: ignore[arg-type]
    else:
        bases = aliased_inputs(node)
    return owners.get(bases[0], bases[0]) if bases else node


def _can_cross(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if any(user.target is operator.getitem for user in node.users):
        return False
    return isinstance(value, (torch.Tensor, torch.SymInt))


def _levels(calls: Sequence[fx.Node]) -> Mapping[fx.Node, int]:
    """How many kernels stand one after the other before a value is there. Calls of one level can be fused;
    what reads a value at a later level reads it from memory."""
    levels: dict[fx.Node, int] = {}
    for node in calls:
        before = max((levels.get(value, 0) for value in node.all_input_nodes), default=0)
        levels[node] = before + (_is_kernel(node) and node.target is not operator.getitem)
    return levels


def _fused(owner: fx.Node, views: Sequence[fx.Node], levels: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The calls that a code generator would fuse with the one that makes a value. It makes it at its level if
    anything is there that reads it, else with the first that does."""
    if _is_kernel(owner):
        return []
    readers = _readers(views)
    pointwise = [node for node in readers if node in levels and not _is_kernel(node)]
    is_made_early = len(pointwise) < len(readers) or any(levels[node] == levels[owner] for node in pointwise)
    home = levels[owner] if is_made_early else min(levels[node] for node in pointwise)
    return [node for node in pointwise if levels[node] == home]


def _readers(views: Sequence[fx.Node]) -> list[fx.Node]:
    """What reads elements of a value that `views` show."""
    users = dict.fromkeys(user for view in views for user in view.users)
    return [user for user in users if user not in views and not _READ_NO_ELEMENT.search(_operator(user))]


def _is_kernel(node: fx.Node) -> bool:
    made_by = node.args[0] if node.target is operator.getitem else node
    return _KERNELS.search(_operator(made_by)) is not None


def _operator(node: Any) -> str:
    return str(getattr(node.target, "_opname", ""))


def _bytes(value: Any) -> float:
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    return bytes_of(value) if isinstance(value, torch.Tensor) else 0.0


#: calls per autograd node in a captured graph: the node, its check, and a projection or two of each.
_CALLS_PER_NODE = 4

#: nodes whose gradients are written to memory in any case, so that nothing is lost by a border behind them.
_WRITES_TO_MEMORY = frozenset(
    {
        "AddmmBackward0",
        "BaddbmmBackward0",
        "BmmBackward0",
        "ConvolutionBackward0",
        "EmbeddingBackward0",
        "LinearBackward0",
        "MmBackward0",
    }
)


def regions_of(run: Sequence[fx.Node], smallest: int, copies: int = 2) -> list[Sequence[fx.Node]]:
    """`run`, divided; in one piece if nothing in it repeats."""
    least = smallest * _CALLS_PER_NODE
    if len(run) < 2 * least:
        return [run]
    return _cut(run, find_repeats([token_of(node) for node in run], _captured_costs(run), least, copies))


def _captured_costs(run: Sequence[fx.Node]) -> list[float | None]:
    place = {node: i for i, node in enumerate(run)}
    uses = [
        (i, used, _captured_cost(node)) for node, i in place.items() if (used := _last_use(node, place)) > i
    ]
    return boundary_costs(len(run), uses)


def _captured_cost(node: fx.Node) -> float | None:
    """What it costs to hand a value over to another region; None for what is no tensor."""
    users = [user for user in node.users if user.op == "call_function"]
    if any(call_of(user).kind is CallKind.PROJECT or user.target is operator.getitem for user in users):
        return None
    return 1.0 if _source(node) in _WRITES_TO_MEMORY else 2.0


def _source(node: fx.Node) -> str:
    """The name of the autograd node that made a value, behind projections and checks of it."""
    place: Any = 0
    while call_of(node).kind in (CallKind.PROJECT, CallKind.VALIDATE):
        before: Any = node.args[0]
        if call_of(node).kind is CallKind.PROJECT:
            place = node.args[1]
        elif not isinstance(before, fx.Node):  # else one gradient, converted for its leaf
            before = before[place]
        if not isinstance(before, fx.Node) or before.op != "call_function":
            return ""
        node = before
    return getattr(node.target, "__name__", "")
