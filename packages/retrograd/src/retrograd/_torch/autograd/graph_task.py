"""A plan inside a backward of torch's: what only the engine can do for it, and what user code asks about it.

In: a function, and the request that it answers. Out: nothing; the function runs exactly once, on this thread
unless it is deeply nested. Inside, ``torch._C._current_graph_task_id()`` is set, ``queue_callback`` works and
its callbacks run when the function has returned, a nested ``.backward()`` is reentrant as in eager, and grad
mode, ``keep_graph`` and the validity of reentrant checkpointing are those of the request.

In: a running backward of ours per thread. Out: ``torch._C._current_autograd_node`` and its like answer for
the autograd node that eager would be executing, instead of for the one node that carries our plan. A stock
backward nested in a plan gets torch's own answers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from retrograd._torch.autograd.collection import window
from retrograd._torch.autograd.request import EngineRequest, run_stock
from retrograd._torch.patches import Handler, handle
from retrograd._torch.releases import is_layout_enforced, unseen
from retrograd._torch.tensor import grad_of, obeys_layout_contract


class _Stack(threading.local):
    def __init__(self) -> None:
        self.running: list[tuple[Any, int]] = []


_stack = _Stack()


@contextmanager
def answering(running: Any) -> Iterator[None]:
    """Answer for `running`, a ``LiveBackward``, on this thread, inside the graph task that is current now."""
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


class _Body(threading.local):
    """The functions to be run on this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Callable[[], None]] = []
        self.root: torch.Tensor | None = None
        self.leaf: torch.Tensor | None = None


_body = _Body()


class _RunBody(torch.autograd.Function):
    """Its backward runs the innermost body of the thread that made it; it produces no gradient.

    A deeply nested backward runs on another thread (``MAX_DEPTH`` in ``engine.h``), while its own waits.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, bodies: list[Callable[[], None]]) -> torch.Tensor:
        ctx.bodies = bodies
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        ctx.bodies[-1]()
        return None, None


def _leaf_and_root(bodies: list[Callable[[], None]]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad(), torch.inference_mode(False):
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        root: torch.Tensor = _RunBody.apply(leaf, bodies)
        return leaf, root


def run_in_graph_task(body: Callable[[], None], request: EngineRequest) -> None:
    """Run `body` as the one node of a backward like `request`."""
    if _body.root is None or _body.leaf is None:
        _body.leaf, _body.root = unseen(functools.partial(_leaf_and_root, _body.stack))
    only_leaf = (_body.leaf,) if request.inputs or not request.accumulate_grad else ()
    task = replace(
        request,
        tensors=(_body.root,),
        grad_tensors=(torch.zeros((), device="cpu"),),
        inputs=only_leaf,
        allow_unreachable=True,
    )
    with window.stock() as has_entered:

        def entered() -> None:
            has_entered()
            body()

        _body.stack.append(entered)
        try:
            run_stock(task)
        finally:
            _body.stack.pop()


def outside_of_graph_task(body: Callable[[], Any], create_graph: bool) -> Any:
    """What `body` returns, run where autograd nodes called by hand compute all their gradients.

    Inside a backward they compute those that it asks for (``Node::task_should_compute_output``).
    """
    found: list[Any] = []
    request = EngineRequest((), (), True, create_graph, accumulate_grad=True)
    run_in_graph_task(lambda: found.append(body()), request)
    return found[0]


#: whether torch was made to warn already, by grad mode: it has one warning for each branch of its code.
_warned: set[bool] = set()


def warn_of_layout(existing: torch.Tensor, grad: torch.Tensor, variable: torch.Tensor) -> None:
    """Have torch warn, if eager would have when it added `grad` to the ``.grad`` that was `existing`.

    It does so in its own words and as often as it wants: an AccumulateGrad node is run on tensors without
    data of the same sizes and strides. The rule is ``CHECK_RESULT`` in ``accumulate_grad.h``.
    """
    total = grad_of(variable)
    create_graph = torch.is_grad_enabled()
    if total is None or (create_graph in _warned and not torch.is_warn_always_enabled()):
        return
    tensors = (total, existing, grad, variable)
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
        return
    if not is_layout_enforced() or obeys_layout_contract(total, variable):
        return
    _warned.add(create_graph)
    with torch.inference_mode(False), torch.enable_grad():
        like = torch.empty_strided(variable.shape, variable.stride(), device="meta").requires_grad_()
        like.grad = _like(existing)
        root = like.view_as(like)
    with window.stock():
        run_stock(EngineRequest((root,), (_like(grad),), create_graph, create_graph, accumulate_grad=True))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
