"""Divides a sequence of calls where it repeats, so that each kind of part is compiled once.

In: an ATen graph, or a run of calls of a `BackwardGraph` in eager's order. Out: the same calls as consecutive
parts: the copies of what repeats, and the calls before, between and after them. For an ATen graph the parts
are outlines, and at least two of them have the same key.

The time is linear in the number of calls, not quadratic. We find periods from the distances at which short
sequences of calls recur, and try only the few most frequent ones.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from retrograd.graph.aliases import aliased_inputs
from retrograd.graph.backward_graph import CallKind, call_of
from retrograd.graph.fx import depends_on_data
from retrograd.graph.structure import token_of
from retrograd.policy import CAPTURED_CALLS_PER_NODE, PERIOD_GRAM, PERIODS_TRIED
from retrograd.repeats.borders import aten_border_costs, border_costs
from retrograd.repeats.outline import Outline, TokenisedCall, holds_graph, outlines, tokenised


@dataclass(frozen=True)
class Repeat:
    """The same `length` calls, `count` times in succession, from `start` on."""

    start: int
    length: int
    count: int

    @property
    def stop(self) -> int:
        """The end of the last copy."""
        return self.start + self.length * self.count

    def cuts(self) -> range:
        """Where the copies begin, and where the last one ends."""
        return range(self.start, self.stop + 1, self.length)


def find_repeats(
    tokens: Sequence[Hashable], costs: Sequence[float | None], least: int, copies: int = 2
) -> list[Repeat]:
    """The repeats in a sequence, in order.

    Args:
        tokens: one per call.
        costs: the cost of a cut before each call, and after the last; None if no cut is possible there. A
            repeat can be divided into copies in several ways; we choose the one with the cheapest cuts.
        least: the smallest number of calls in a copy. If a period is shorter, a copy spans several periods.
        copies: the smallest number of copies in a repeat, two or more.
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
    """For every candidate period, the best division of every stretch that has this period."""
    for period in _periods(tokens, start, stop):
        for first, last in _stretches(tokens, period, start, stop):
            length = period * -(-least // period)
            repeat = _divided(costs, first, last, period, length)
            if repeat is not None:
                yield repeat


def _periods(tokens: Sequence[int], start: int, stop: int) -> list[int]:
    """Distances at which the same few tokens recur, the most frequent first."""
    seen: dict[tuple[int, ...], int] = {}
    votes: Counter[int] = Counter()
    for i in range(start, stop - PERIOD_GRAM + 1):
        gram = tuple(tokens[i : i + PERIOD_GRAM])
        if gram in seen:
            votes[i - seen[gram]] += 1
        seen[gram] = i
    return [period for period, _ in votes.most_common(PERIODS_TRIED)]


def _stretches(tokens: Sequence[int], period: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The stretches, at least two periods long, in which every token equals the token one period later."""
    first = start
    for i in range(start, stop - period + 1):
        if i == stop - period or tokens[i] != tokens[i + period]:
            if i - first >= period:
                yield first, i + period
            first = i + 1


def _divided(costs: Sequence[float | None], first: int, last: int, period: int, length: int) -> Repeat | None:
    """The repeat between `first` and `last` with the cheapest cuts; then, with the most calls in copies."""
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


_OPS = frozenset({"placeholder", "get_attr", "call_function", "output"})


def divided(graph: fx.Graph, least: int, visible: int | None, copies: int = 2) -> list[Outline]:
    """The parts of `graph`, in order. Empty if nothing in it repeats."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if len(calls) < 2 * least or not _can_be_divided(graph):
        return []
    known = {node: tokenised(node) for node in calls}
    repeats = find_repeats([known[node].token for node in calls], aten_border_costs(calls), least, copies)
    # If a copy is nothing but views, a call of shared code saves nothing.
    repeats = [one for one in repeats if not all(map(aliased_inputs, calls[one.start : one.stop]))]
    if not repeats:
        return []
    parts = _united(_cut(calls, repeats), known, _results(graph, visible))
    return parts if len({part.key for part in parts}) < len(parts) else []


def cut_at(graph: fx.Graph, visible: int | None, separate: Collection[fx.Node]) -> list[Outline]:
    """The parts of `graph`, in order, if we cut it before and after each of the calls `separate`. Empty if it
    cannot be divided."""
    if not _can_be_divided(graph):
        return []
    calls: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for one in _with_elements(node):
            calls.setdefault(one, node in separate)
    known = {node: tokenised(node) for node in calls}
    runs = [list(group) for _, group in itertools.groupby(calls, key=calls.__getitem__)]
    return outlines(runs, known, _results(graph, visible))


def _with_elements(node: fx.Node) -> Iterator[fx.Node]:
    """A call, and the elements of the tuple that it makes, also of tuples in it. They stay in one part,
    because only tensors can cross a border."""
    yield node
    for user in node.users:
        if user.target is operator.getitem:
            yield from _with_elements(user)


def _cut(calls: Sequence[fx.Node], repeats: Sequence[Repeat]) -> list[Sequence[fx.Node]]:
    """The copies of what repeats, and the calls before, between and after them."""
    cuts = sorted({0, len(calls), *(cut for repeat in repeats for cut in repeat.cuts())})
    return [calls[start:stop] for start, stop in itertools.pairwise(cuts)]


def _can_be_divided(graph: fx.Graph) -> bool:
    return not any(
        node.op not in _OPS
        or (node.op == "placeholder" and "val" not in node.meta)
        or (node.op == "get_attr" and "val" not in node.meta and not holds_graph(node))
        or (node.op == "call_function" and depends_on_data(node))
        for node in graph.nodes
    )


def _results(graph: fx.Graph, visible: int | None) -> Mapping[fx.Node, bool]:
    """The graph's results, and whether each must have its traced strides."""
    given: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    found: dict[fx.Node, bool] = {}
    for place, node in enumerate(given):
        if isinstance(node, fx.Node):
            found[node] = found.get(node, False) or place < (visible or 0)
    return found


def _united(
    runs: Sequence[Sequence[fx.Node]], known: Mapping[fx.Node, TokenisedCall], results: Mapping[fx.Node, bool]
) -> list[Outline]:
    """The outlines of `runs`, after merging neighbours that equal no other run."""
    parts = outlines(runs, known, results)
    count = Counter(part.key for part in parts)
    united: list[Sequence[fx.Node]] = []
    pairs = zip(runs, (count[part.key] == 1 for part in parts), strict=True)
    for is_single, group in itertools.groupby(pairs, key=operator.itemgetter(1)):
        same = [run for run, _ in group]
        united += [[node for run in same for node in run]] if is_single else same
    return outlines(united, known, results) if len(united) < len(runs) else parts


def regions_of(run: Sequence[fx.Node], smallest: int, copies: int = 2) -> list[Sequence[fx.Node]]:
    """`run`, divided into regions. One region if nothing in it repeats."""
    least = smallest * CAPTURED_CALLS_PER_NODE
    if len(run) < 2 * least:
        return [run]
    tokens = [token_of(node) for node in run]
    return _cut(run, find_repeats(tokens, border_costs(run, _captured_cost), least, copies))


def _captured_cost(node: fx.Node) -> float | None:
    """The cost of passing a value to another region; None if it is a tuple."""
    users = [user for user in node.users if user.op == "call_function"]
    is_tuple = any(
        call_of(user).kind is CallKind.PROJECT or user.target is operator.getitem for user in users
    )
    return None if is_tuple else 1.0
