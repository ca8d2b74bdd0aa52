"""Faults of the backward: how gradients are accumulated, what the engine forgets, what leaks out of it.

In: nothing. Out: contexts around a program's backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from unittest import mock

import torch

from gradparity.subjects.planted.fault import Fault, Planted, within

Leaves = list[torch.Tensor]
ENGINE = "_execution_engine"


def leaves_of(roots: Any) -> Leaves:
    """The leaves into which a backward from these roots would accumulate."""
    listed = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    waiting = [root.grad_fn for root in listed if root.grad_fn is not None]
    seen: set[Any] = set()
    found: Leaves = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def engine(before: Callable[[Leaves], Any], after: Callable[[Leaves, Any], None]) -> Callable[[], Any]:
    """A context in which every backward is told of, with the leaves that it reaches."""

    @contextmanager
    def context() -> Iterator[None]:
        original = torch.autograd.backward

        def run(tensors: Any, *args: Any, **kwargs: Any) -> None:
            leaves = leaves_of(tensors)
            noted = before(leaves)
            original(tensors, *args, **kwargs)
            after(leaves, noted)

        with mock.patch.object(torch.autograd, "backward", run):
            yield

    return context


def _nothing(leaves: Leaves, noted: Any = None) -> None:
    """Does nothing."""


def each_grad(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Leaves, Any], None]:
    """Changes the `.grad` of every leaf after the backward."""

    def changed(leaves: Leaves, noted: Any) -> None:
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad = change(leaf.grad)

    return changed


def _forget(leaves: Leaves) -> None:
    for leaf in leaves:
        leaf.grad = None


def _grads(leaves: Leaves) -> list[torch.Tensor | None]:
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def _add_again(leaves: Leaves, noted: list[torch.Tensor | None]) -> None:
    for leaf, before in zip(leaves, noted, strict=True):
        if before is not None and leaf.grad is not None:
            leaf.grad = leaf.grad + before


def _turned(grad: torch.Tensor) -> torch.Tensor:
    return grad.mT.contiguous().mT if grad.ndim > 1 and grad.layout is torch.strided else grad


def _none_for_zeros(grad: torch.Tensor) -> torch.Tensor | None:
    return grad if grad.layout is not torch.strided or bool(grad.any()) else None


def _shared(leaves: Leaves, noted: Any) -> None:
    """Leaves of equal shape get one gradient between them."""
    by_shape: dict[Any, torch.Tensor] = {}
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad = by_shape.setdefault((leaf.shape, leaf.dtype, leaf.grad.layout), leaf.grad)


class _Static:
    """Gradients live in memory that the next backward overwrites, as with graphs that are replayed."""

    def __init__(self) -> None:
        self.memory: dict[tuple[Any, ...], torch.Tensor] = {}

    def place(self, leaves: Leaves, noted: Any) -> None:
        """Moves every gradient into the memory of its leaf."""
        for number, leaf in enumerate(leaves):
            if leaf.grad is not None and leaf.grad.layout is torch.strided and not leaf.grad.requires_grad:
                key = (number, leaf.shape, leaf.dtype)
                grad = self.memory.setdefault(key, torch.empty_like(leaf.grad))
                leaf.grad = grad.copy_(leaf.grad)


def _static(name: str) -> Planted:
    memory = _Static()
    return Planted(name, backward=engine(_nothing, memory.place))


@contextmanager
def _options(**forced: Any) -> Iterator[None]:
    """Options of `backward` and `grad` are not what the program says."""
    backward, grad = torch.autograd.backward, torch.autograd.grad

    def run(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        names = ("retain_graph", "create_graph", "grad_variables", "inputs")
        given = dict(zip(names, args, strict=False)) | kwargs
        backward(
            tensors, grad_tensors, **given | {key: value for key, value in forced.items() if key in names}
        )

    def derive(*args: Any, **kwargs: Any) -> Any:
        return grad(*args, **kwargs | {key: value for key, value in forced.items() if key != "inputs"})

    with mock.patch.multiple(torch.autograd, backward=run, grad=derive):
        yield


@contextmanager
def _without_callbacks() -> Iterator[None]:
    """`queue_callback` does nothing."""
    before: Any = torch.autograd.Variable._execution_engine

    class Forgetful:
        """The engine without a memory for callbacks."""

        def queue_callback(self, callback: Any) -> None:
            """Forgets it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(before, name)

    with mock.patch.object(torch.autograd.Variable, ENGINE, Forgetful()):
        yield


@contextmanager
def _leaving_grad_mode() -> Iterator[None]:
    yield
    torch.set_grad_enabled(False)


@contextmanager
def _on_one_thread() -> Iterator[None]:
    before = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(False)
    yield
    torch._C._set_multithreading_enabled(before)


@contextmanager
def _restored_grad_mode() -> Iterator[None]:
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


def _leaky(name: str) -> Planted:
    return Planted(name, backward=_leaving_grad_mode, around=_restored_grad_mode)


def _is_elsewhere() -> bool:
    return threading.current_thread() is not threading.main_thread()


def _elsewhere(owner: Any, name: str, instead: Any = None) -> Callable[[str], Planted]:
    """A function that is called in another thread than the main one does nothing."""

    def around() -> AbstractContextManager[Any]:
        before = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            return instead if _is_elsewhere() else before(*args, **kwargs)

        return mock.patch.object(owner, name, run)

    return lambda fault: Planted(fault, around=around)


class _NoHandle:
    """What stands for a hook that was not registered."""

    def remove(self) -> None:
        """Removes nothing."""


GRAD = ("grad-values-bits",)
VALUES = ("values-bits", *GRAD)
STEPS = ("steps_grads", "steps_mixed", "phases", "second_order")

FAULTS = (
    Fault("grad-overwritten", "a gradient that is there already is replaced", within(engine(_forget, _nothing)), VALUES, STEPS),
    Fault("grad-added-twice", "a gradient that is there already is added twice", within(engine(_grads, _add_again)), VALUES, STEPS),
    Fault("grad-layout", "`.grad` is laid out otherwise", within(engine(_nothing, each_grad(_turned))), ("grad-strides", "value-strides"), ("linear", "views")),
    Fault("grad-shared", "two leaves share one gradient", within(engine(_nothing, _shared)), VALUES, ("elementwise", "hooks", "steps_mixed")),
    Fault("grad-memory-reused", "`.grad` is memory that the next backward overwrites", _static, VALUES, ("steps_grads", "steps_optimizer", "second_order")),
    Fault("zeros-become-none", "a gradient of zeros is None", within(engine(_nothing, each_grad(_none_for_zeros))), ("grad-none", "value-none"), ("elementwise", "layouts")),
    Fault("grad-requires-grad", "`.grad` requires grad", within(engine(_nothing, each_grad(lambda grad: grad.detach().requires_grad_()))),
          ("grad-requires_grad", "value-requires_grad"), ("elementwise", "linear")),
    Fault("graph-not-freed", "a second backward through a freed graph works", within(lambda: _options(retain_graph=True)), ("no-exception",), ("second_order", "outputs")),
    Fault("create-graph-ignored", "a gradient has no graph of its own", within(lambda: _options(create_graph=False)),
          ("raises RuntimeError", "no-exception", "grad-requires_grad", "value-requires_grad"), ("second_order",)),
    Fault("inputs-ignored", "`inputs=` does not choose where gradients go", within(lambda: _options(inputs=None)), ("grad-none", *GRAD, "hook-count", "no-exception"), ("hooks", "elementwise")),
    Fault("error-swallowed", "an error of a hook or a Function is swallowed", within(lambda: suppress(ValueError)), ("no-exception", "values-observed"), ("steps_errors", "functions")),
    Fault("callbacks-dropped", "callbacks for the end of the backward are dropped", within(_without_callbacks), ("hook-count",), ("steps_hooks",)),
    Fault("grad-mode-leaks", "grad mode stays off after a backward", _leaky, ("raises RuntimeError", "value-requires_grad", "no-exception"), ("steps_modes", "second_order")),
    Fault("interrupt-leaks", "an exception leaves the engine on one thread", within(_on_one_thread), ("interrupt",), (), "interrupts"),
    Fault("thread-backward-lost", "a backward in another thread accumulates nothing", _elsewhere(torch.autograd, "backward"),
          ("value-none", "grad-none", "grad-values-bits", "values-bits"), ("steps_threads",)),
    Fault("thread-hook-lost", "a hook that another thread registers does not run", _elsewhere(torch.Tensor, "register_hook", _NoHandle()),
          ("hook-count",), ("steps_threads",)),
)  # fmt: skip
