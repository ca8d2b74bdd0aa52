"""Answers user code's questions about the running node while plans run on this thread.

In: a `LiveBackward`, and the function that runs its plan. Out: while the plan runs,
``torch._C._current_autograd_node`` and its like answer with the autograd node that eager would be executing,
not with the one node that carries the plan. Inside a stock backward nested in a plan, torch's own answers
hold. We also record for each running plan whether a nested backward executes its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from retrograd.engine.request import (
    EngineRequest,
    LiveBackward,
    edge_of,
    is_transformed,
    nodes_below,
    read_live_graph,
)
from retrograd.facts.patches import Handler, handle
from retrograd.graph.eager_order import executed_nodes
from retrograd.process import ThreadValue

T = TypeVar("T")

#: A small graph has at most this many nodes.
SMALL = 32


#: the plans that run on this thread, innermost last, and the graph task of each
_running: ThreadValue[tuple[tuple[LiveBackward, int], ...]] = ThreadValue(())


def answering(running: LiveBackward, body: Callable[..., T], *args: Any) -> T:
    """Return ``body(*args)``. Inside, queries on this thread and in the current graph task are answered for
    `running`."""
    with _running.switched((*_running.get(), (running, torch._C._current_graph_task_id()))):
        return body(*args)


def plans_under_way() -> int:
    """The number of plans that run on this thread, nested in one another."""
    return len(_running.get())


def note_reentry(request: EngineRequest) -> None:
    """A backward begins while plans run on this thread: mark the plans whose nodes it executes."""
    plans = _running.get()
    if not plans or is_transformed(request):
        return
    if any(edge_of(root)[0] is None for root in request.tensors):
        return  # torch will refuse it
    below = list(nodes_below(map(edge_of, request.tensors)))
    if all(running.inner_nodes.isdisjoint(below) for running, _ in plans):
        return  # fast path for the usual case
    live = read_live_graph(request)
    nodes = [live.nodes[i].handle for i in executed_nodes(live, request.accumulate_grad)]
    for running, _ in plans:
        running.is_reentered = running.is_reentered or not running.inner_nodes.isdisjoint(nodes)


def is_small(request: EngineRequest) -> bool:
    """Whether the graph of `request` has at most `SMALL` nodes and no Function. The engine finishes such a
    backward sooner than we could collect it."""
    for count, node in enumerate(nodes_below(map(edge_of, request.tensors))):
        if count >= SMALL or hasattr(node, "apply"):
            return False
    return True


def node_under_way() -> Any:
    """The autograd node that eager would be executing in the innermost plan; None if no plan runs."""
    plans = _running.get()
    return plans[-1][0].current_node() if plans else None


def _answered(answer: Callable[..., Any]) -> Handler:
    def ask(stock: Callable[..., Any], *args: Any) -> Any:
        plans = _running.get()
        running, task = plans[-1] if plans else (None, None)
        is_current = running is not None and task == torch._C._current_graph_task_id()
        return answer(running, *args) if is_current else stock(*args)

    return ask


_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "torch._C:_current_autograd_node": lambda running: running.current_node(),
    "torch._C:_will_engine_execute_node": lambda running, node: running.will_execute(node),
    "torch._C:_current_graph_task_execution_order": lambda running: running.execution_order(),
}


def answer_queries() -> None:
    """From now on, answer queries of user code for the plan that runs on its thread."""
    for name, answer in _ANSWERS.items():
        handle(name, _answered(answer))
