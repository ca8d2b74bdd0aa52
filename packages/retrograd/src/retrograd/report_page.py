"""Renders a report as HTML: what ran where, and the steps of each captured backward.

In: a `Report`. Out: text that a notebook shows, or one page that needs nothing else: no script, no font, no
network. The template ``report_page.html`` has the words and the colours.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from retrograd.graph.backward_graph import Accumulation, OpaqueCall, Segment, call_of


@dataclass(frozen=True)
class Row:
    """One step of a captured backward, or several accumulations in a row.

    Attributes:
        kind: ``compiled``, ``shared``, ``interpreted``, ``opaque`` or ``accumulation``.
        what: the step in words, and why it is not compiled.
        nodes: names of its autograd nodes, each with how often it follows itself.
        size: the number of nodes.
        source: the line of the forward that made its first node, if known.
    """

    kind: str
    what: str
    nodes: tuple[str, ...]
    size: int
    source: str = ""


def rows_of(backward: Any) -> list[Row]:
    """The rows of a `BackwardReport`, in the order in which they run."""
    return [*_rows(backward)]


def _rows(backward: Any) -> Iterator[Row]:
    graph, last = backward.graph, {low.segment: low for low in backward.lowerings}
    number, leaves = 0, list[str]()
    for step in backward.schedule.steps:
        nodes = step.nodes if isinstance(step, Segment) else (step.node,)
        calls = [graph.node_calls[i] for i in dict.fromkeys(call_of(node).node_call for node in nodes)]
        names = [call.name.rpartition("::")[2] for call in calls]
        if isinstance(step, Accumulation):
            leaves += names
            continue
        yield from _accumulated(leaves)
        leaves = []
        source = next((call.source for call in calls if call.source), "")
        if isinstance(step, OpaqueCall):
            yield Row("opaque", step.reason, tuple(names), 1, source)
            continue
        how = backward.way(step, last.get(number))
        kind = {"compiled": "compiled", "with the code of an equal one": "shared"}.get(how, "interpreted")
        what = f"segment {number}" + (f", {how}" if kind == "interpreted" else "")
        yield Row(kind, what, _with_counts(names), len(names), source)
        number += 1
    yield from _accumulated(leaves)


def _accumulated(leaves: Sequence[str]) -> Iterator[Row]:
    if leaves:
        yield Row("accumulation", "into .grad", _with_counts(leaves), len(leaves))


def _with_counts(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each run of equal ones as one with a count."""
    runs = ((name, len([*equal])) for name, equal in itertools.groupby(names))
    return tuple(name if count == 1 else f"{name} ×{count}" for name, count in runs)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


def page_of(report: Any, whole: bool = True) -> str:
    """The report as HTML.

    Args:
        report: a `Report`.
        whole: whether to return a page, or only what a notebook puts into its own.
    """
    kinds = sum((entry.ways() for entry in report.backwards), Counter[str]())
    return _template().render(report=report, rows_of=rows_of, ways=kinds, whole=whole)
