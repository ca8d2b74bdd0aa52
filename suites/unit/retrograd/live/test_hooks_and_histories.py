"""Hooks that give a tensor another history or are added to the node that runs, and graphs of two threads.

In: programs that return what eager gives, run twice: a known structure takes another way than a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import retrograd


def _leaf() -> Tensor:
    return torch.tensor([1.0, 2.0], requires_grad=True)


def _noted(events: list[str], name: str) -> Callable[[Tensor], Any]:
    return lambda grad: events.append(f"{name} {grad.tolist()}")


def _change_in_place(value: Tensor) -> None:
    with torch.enable_grad():
        value.mul_(2)


def _changed(root: Tensor, changed: Tensor, late: Tensor, events: list[str]) -> Callable[[], None]:
    """A backward, in which a hook of `root` changes a tensor in place and adds a hook to another."""

    def add(grad: Tensor) -> None:
        _change_in_place(changed)
        late.register_hook(_noted(events, "late"))

    root.register_hook(add)
    return lambda: root.backward(torch.ones_like(root), retain_graph=True)


def a_hook_changes_the_root_in_place_and_adds_a_hook() -> list[Any]:
    events: list[str] = []
    y = _leaf() * 3
    z = y.cos()
    run = _changed(z, z, y, events)
    run()
    run()
    return events


def a_hook_changes_the_root_in_place_and_adds_a_hook_to_the_leaf() -> list[Any]:
    events: list[str] = []
    x = _leaf()
    y = x * 2
    run = _changed(y, y, x, events)
    run()
    run()
    return [*events, x.grad.tolist()]


def a_hook_changes_a_requested_value_in_place() -> list[Any]:
    events: list[str] = []
    x = _leaf()
    y = x * 3
    z = y * 2

    def add(grad: Tensor) -> None:
        x.register_hook(_noted(events, "late"))
        y.register_hook(_noted(events, "of the old y"))
        _change_in_place(y)

    z.register_hook(add)
    found = torch.autograd.grad(z.sum(), (y, x))
    return [*events, *[grad.tolist() for grad in found]]


def a_value_changes_in_place_after_retain_grad() -> list[Any]:
    y = _leaf() * 3
    z = y * 2

    def retain(grad: Tensor) -> None:
        y.retain_grad()
        _change_in_place(y)

    z.register_hook(retain)
    z.sum().backward()
    return [y.grad is None]


def _times(events: list[str], name: str, factor: int) -> Callable[..., Any]:
    """A post hook of a node."""

    def hook(out: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Any:
        events.append(f"{name} {[grad.tolist() for grad in (*out, *grads)]}")
        return tuple(grad * factor for grad in out)

    return hook


class _HooksItsNode(torch.autograd.Function):
    register: Callable[[Any], Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _HooksItsNode.register(ctx)
        return grad * ctx.saved_tensors[0]


def _own_node(
    register: Callable[[list[str], Any], Any], before: Callable[[Any], Any] | None = None
) -> list[Any]:
    """Two backwards, in which a Function registers hooks on the node that runs it."""
    events: list[str] = []
    _HooksItsNode.register = lambda node: register(events, node) and None
    x = _leaf()
    y = _HooksItsNode.apply(x.sin())
    if before is not None:
        before(y.grad_fn)
    z = y.cos().sum()
    z.backward(retain_graph=True)
    z.backward()
    return [*events, x.grad.tolist()]


def a_function_adds_post_hooks_to_its_own_node() -> list[Any]:
    def register(events: list[str], node: Any) -> None:
        node.register_hook(_times(events, "one", 3))
        node.register_hook(_times(events, "two", 5))

    return _own_node(register)


def a_function_adds_a_pre_hook_to_its_own_node() -> list[Any]:
    return _own_node(lambda events, node: node.register_prehook(lambda grads: events.append("pre")))


def a_function_adds_a_post_hook_beside_an_older_one() -> list[Any]:
    return _own_node(
        lambda events, node: node.register_hook(_times(events, "new", 3)),
        lambda node: node.register_hook(_times([], "old", 7)),
    )


def a_function_adds_a_post_hook_where_one_was_removed() -> list[Any]:
    return _own_node(
        lambda events, node: node.register_hook(_times(events, "new", 3)),
        lambda node: node.register_hook(_times([], "old", 7)).remove(),
    )


def a_function_adds_a_post_hook_and_removes_another() -> list[Any]:
    def register(events: list[str], node: Any) -> None:
        node.register_hook(_times(events, "gone", 3)).remove()
        node.register_hook(_times(events, "new", 5))

    return _own_node(register)


def an_unpack_hook_adds_a_post_hook_to_its_node() -> list[Any]:
    events: list[str] = []
    x = _leaf()

    def unpack(value: Tensor) -> Tensor:
        y.grad_fn.register_hook(_times(events, "post", 3))
        return value

    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        y = (x * 2).sin()
    y.sum().backward()
    return [*events, x.grad.tolist()]


def a_leaf_s_hook_adds_a_post_hook_to_its_node() -> list[Any]:
    events: list[str] = []
    x = _leaf()
    node = torch.autograd.graph.get_gradient_edge(x).node
    x.register_post_accumulate_grad_hook(lambda x: node.register_hook(_times(events, "post", 3)) and None)
    y = x.sin().sum()
    y.backward(retain_graph=True)
    y.backward()
    return events


def _detached(run: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    """What a backward raises after a hook has detached a saved tensor, or the gradient."""
    x = _leaf()
    y = x * 3
    try:
        run(y, y.sin())
    except RuntimeError as error:
        return [str(error), x.grad is None]
    return [x.grad.tolist()]


def a_hook_detaches_a_saved_tensor() -> list[Any]:
    def run(y: Tensor, z: Tensor) -> None:
        z.register_hook(lambda grad: setattr(y.detach_(), "grad", None))
        z.sum().backward()

    return _detached(run)


def a_hook_detaches_a_tensor_that_is_not_saved() -> list[Any]:
    def run(y: Tensor, z: Tensor) -> None:
        z.register_hook(lambda grad: setattr(z.detach_(), "grad", None))
        z.sum().backward()

    return _detached(run)


def a_hook_detaches_what_a_function_saved() -> list[Any]:
    def run(y: Tensor, z: Tensor) -> None:
        _HooksItsNode.register = lambda node: None
        w = _HooksItsNode.apply(y)
        w.register_hook(lambda grad: setattr(y.detach_(), "grad", None))
        w.sum().backward()

    return _detached(run)


def _on_a_thread(make: Callable[[], Tensor]) -> Tensor:
    """The result of `make`. Sequence numbers of nodes begin with 0 on each thread."""
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    return made[0]


def a_hook_is_removed_from_one_of_two_threads_graphs() -> list[Any]:
    def triple(grad: Tensor) -> Tensor:
        return grad * 3

    x, other = _leaf(), _leaf()
    a, b = _on_a_thread(lambda: x.sin()), _on_a_thread(lambda: other.sin())
    handles = [y.register_hook(triple) for y in (a, b)]
    c = a * b
    c.register_hook(lambda grad: handles[1].remove())
    c.sum().backward()
    return [x.grad.tolist(), other.grad.tolist()]


def a_hook_is_removed_from_another_graph_of_another_thread() -> list[Any]:
    def triple(grad: Tensor) -> Tensor:
        return grad * 3

    x, other = _leaf(), _leaf()
    a, b = _on_a_thread(lambda: x.sin()), _on_a_thread(lambda: other.sin())
    handles = [y.register_hook(triple) for y in (a, b)]
    c = a.cos()
    c.register_hook(lambda grad: handles[1].remove())
    c.sum().backward()
    return [x.grad.tolist()]


def _order_of_threads(older: Sequence[int]) -> str:
    """The order in which the graphs of threads run, of which each made some nodes before."""
    events: list[str] = []
    x = _leaf()

    def graph(name: str, count: int) -> Tensor:
        for _ in range(count):
            x.sin()
        y = x.sin()
        y.register_hook(lambda grad: events.append(name))
        return y

    made = [_on_a_thread(partial(graph, name, n)) for name, n in zip("abc", older, strict=True)]
    torch.stack(made).sum().backward()
    return "".join(events)


def graphs_of_threads_with_equal_and_with_other_numbers() -> list[Any]:
    return [_order_of_threads(older) for older in ((0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 0, 0))]


@pytest.mark.parametrize(
    "program",
    [
        a_hook_changes_the_root_in_place_and_adds_a_hook,
        a_hook_changes_the_root_in_place_and_adds_a_hook_to_the_leaf,
        a_hook_changes_a_requested_value_in_place,
        a_value_changes_in_place_after_retain_grad,
        a_function_adds_post_hooks_to_its_own_node,
        a_function_adds_a_pre_hook_to_its_own_node,
        a_function_adds_a_post_hook_beside_an_older_one,
        a_function_adds_a_post_hook_where_one_was_removed,
        a_function_adds_a_post_hook_and_removes_another,
        an_unpack_hook_adds_a_post_hook_to_its_node,
        a_leaf_s_hook_adds_a_post_hook_to_its_node,
        a_hook_detaches_a_saved_tensor,
        a_hook_detaches_a_tensor_that_is_not_saved,
        a_hook_detaches_what_a_function_saved,
        a_hook_is_removed_from_one_of_two_threads_graphs,
        a_hook_is_removed_from_another_graph_of_another_thread,
        graphs_of_threads_with_equal_and_with_other_numbers,
    ],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_as_eager(program: Callable[[], list[Any]], backend: str) -> None:
    expected = program()
    with retrograd.compiled_autograd(backend=backend):
        assert [program(), program()] == [expected, expected]
