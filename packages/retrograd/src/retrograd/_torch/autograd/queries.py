"""What user code asks torch about the backward that is running, answered for a running plan.

In: a `Running` backward of ours per thread. Out: ``torch._C._current_autograd_node`` and its like answer for
the autograd node that eager would be executing, instead of for the one node that carries our plan. A stock
backward nested in a plan gets torch's own answers.

``_current_graph_task_id`` needs no help: the plan runs in a graph task of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from retrograd._torch.patches import Handler, handle


class Running(Protocol):
    """A plan under way."""

    def current_node(self) -> Any: ...
    def will_execute(self, node: Any) -> bool: ...
    def execution_order(self) -> list[Any]: ...


class _Stack(threading.local):
    def __init__(self) -> None:
        self.running: list[tuple[Running, int]] = []


_stack = _Stack()


@contextmanager
def answering(running: Running) -> Iterator[None]:
    """Answer for `running` on this thread, inside the graph task that is current now."""
    _stack.running.append((running, torch._C._current_graph_task_id()))
    try:
        yield
    finally:
        _stack.running.pop()


def plans_under_way() -> int:
    """How many plans are running on this thread, nested in one another."""
    return len(_stack.running)


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
