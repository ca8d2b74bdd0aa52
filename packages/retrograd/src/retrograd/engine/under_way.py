"""The plans of ours that are running on this thread.

In: a `LiveBackward` and what runs its plan. Out: meanwhile, ``torch._C._current_autograd_node`` and its like
answer for the autograd node that eager would be executing, instead of for the one node that carries the plan.
A stock backward nested in a plan gets torch's own answers. And of each backward that begins meanwhile it is
noted whether it executes nodes of such a plan.
"""

from __future__ import annotations

import threading
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
from retrograd.process import restore_after_errors

T = TypeVar("T")

#: how many nodes a small graph has at most.
SMALL = 32


class _Stack(threading.local):
    def __init__(self) -> None:
        self.running: list[tuple[LiveBackward, int]] = []


_stack = _Stack()
restore_after_errors(
    lambda: len(_stack.running), lambda count: _stack.running.__delitem__(slice(count, None))
)


def answering(running: LiveBackward, body: Callable[..., T], *args: Any) -> T:
    """What ``body(*args)`` returns. Inside, answer for `running` on this thread, in the graph task that is
    current now."""
    _stack.running.append((running, torch._C._current_graph_task_id()))
    try:
        return body(*args)
    finally:
        _stack.running.pop()


def plans_under_way() -> int:
    """How many plans are running on this thread, nested in one another."""
    return len(_stack.running)


def note_reentry(request: EngineRequest) -> None:
    """A backward begins inside plans of this thread: note those whose nodes it executes."""
    if not _stack.running or is_transformed(request):
        return
    if any(edge_of(root)[0] is None for root in request.tensors):
        return  # torch will refuse it
    below = list(nodes_below(map(edge_of, request.tensors)))
    if all(running.inner_nodes.isdisjoint(below) for running, _ in _stack.running):
        return  # the usual case, quickly
    live = read_live_graph(request)
    nodes = [live.nodes[i].handle for i in executed_nodes(live, request.accumulate_grad)]
    for running, _ in _stack.running:
        running.is_reentered = running.is_reentered or not running.inner_nodes.isdisjoint(nodes)


def is_small(request: EngineRequest) -> bool:
    """Whether the graph of `request` has so few nodes, none of them a Function's, that the engine has run it
    before it is collected."""
    for count, node in enumerate(nodes_below(map(edge_of, request.tensors))):
        if count >= SMALL or hasattr(node, "apply"):
            return False
    return True


def node_under_way() -> Any:
    """The autograd node that eager would be executing in the innermost plan; None if none is running."""
    return _stack.running[-1][0].current_node() if _stack.running else None


def _answered(answer: Callable[..., Any]) -> Handler:
    def ask(stock: Callable[..., Any], *args: Any) -> Any:
        running, task = _stack.running[-1] if _stack.running else (None, None)
        is_current = running is not None and task == torch._C._current_graph_task_id()
        return answer(running, *args) if is_current else stock(*args)

    return ask


_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "torch._C:_current_autograd_node": lambda running: running.current_node(),
    "torch._C:_will_engine_execute_node": lambda running, node: running.will_execute(node),
    "torch._C:_current_graph_task_execution_order": lambda running: running.execution_order(),
}


def answer_queries() -> None:
    """From here on, answer what user code asks while a plan of its thread is running."""
    for name, answer in _ANSWERS.items():
        handle(name, _answered(answer))
