"""A plan inside a backward of torch's: what only the engine can do for it, and what user code does meanwhile.

In: a function, and the request that it answers. Out: nothing; the function runs exactly once, on this thread
unless it is deeply nested. Inside, ``torch._C._current_graph_task_id()`` is set, ``queue_callback`` works and
its callbacks run when the function has returned, a nested ``.backward()`` is reentrant as in eager, and grad
mode, ``keep_graph`` and the validity of reentrant checkpointing are those of the request.

In: registrations and removals of hooks on any thread, seen at torch's Python entry points to them. Out:
`HookChanges`. Eager looks hooks up when it reaches a node; a plan knows the hooks that were there when it was
collected, and must be told of what changed since.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._dynamo import compiled_autograd as engine_protocol
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from retrograd.engine.collection import call_engine
from retrograd.engine.request import EngineRequest
from retrograd.engine.stock_entry import window
from retrograd.errors import Escape
from retrograd.facts.patches import Handler, handle
from retrograd.facts.releases import unseen
from retrograd.graph.backward_graph import HookKind
from retrograd.process import restore_after_errors
from retrograd.runtime.tensor import PLAIN_CLASSES

#: is given a dictionary of hooks, and the tensor that it belongs to, unless that is a node.
OnHook = Callable[[Any, torch.Tensor | None], None]


class _Body(threading.local):
    """The functions to be run on this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Callable[[], None]] = []
        self.root: torch.Tensor | None = None
        self.leaf: torch.Tensor | None = None


_body = _Body()


def _put_bodies_back(count: int) -> None:
    del _body.stack[count:]


restore_after_errors(lambda: len(_body.stack), _put_bodies_back)


class _RunBody(torch.autograd.Function):
    """Its backward runs the innermost body of the thread that made it; it produces no gradient.

    A deeply nested backward runs on another thread (torch's ``MAX_DEPTH``), while its own waits.
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
            call_engine(task)
        finally:
            _body.stack.pop()


def outside_of_graph_task(body: Callable[[], Any], create_graph: bool) -> Any:
    """What `body` returns, run where autograd nodes called by hand compute all their gradients.

    Inside a backward they compute those that it asks for (``Node::task_should_compute_output``).
    """
    if torch._C._current_graph_task_id() == -1:
        return body()
    found: list[Any] = []
    request = EngineRequest((), (), True, create_graph, accumulate_grad=True)
    levels = torch._C._vmapmode_increment_nesting()
    try:  # torch refuses such a backward inside its older vmap, which ``is_grads_batched`` uses
        for _ in range(levels):
            torch._C._vmapmode_decrement_nesting()
        run_in_graph_task(lambda: found.append(body()), request)
    finally:
        for _ in range(levels - 1):
            torch._C._vmapmode_increment_nesting()
    return found[0]


@dataclass(frozen=True)
class LateHook:
    """A hook registered while a plan runs: on gradient `slot` of `node`. Its handle has this `number`."""

    kind: HookKind
    node: Any
    slot: int
    hook: Callable[..., Any]
    number: int


@dataclass(eq=False)
class HookChanges:
    """What changed since the last look, for a plan on this `thread`."""

    thread: int = 0
    late: list[LateHook] = field(default_factory=list)
    removed: list[Any] = field(default_factory=list)
    _unplaced: list[tuple[Any, Callable[..., Any], int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.late or self.removed or self._unplaced)

    def take(self, nodes: Iterable[Any]) -> tuple[list[LateHook], list[Any]]:
        """The changes, which are forgotten here; hooks put on one of `nodes` itself are found there."""
        late = [*self.late, *self._placed(nodes)]
        removed = list(self.removed)
        self.late.clear()
        self.removed.clear()
        self._unplaced.clear()
        return late, removed

    def went(self, hook: Any, number: int) -> None:
        """The hook with this handle was removed: it has not come, if it came since the last look. Two threads
        may give their handles one number: torch counts without a lock."""
        count = len(self.late) + len(self._unplaced)
        self.late[:] = [late for late in self.late if (late.hook, late.number) != (hook, number)]
        self._unplaced[:] = [one for one in self._unplaced if one[1:] != (hook, number)]
        if len(self.late) + len(self._unplaced) == count:
            self.removed.append(hook)

    def _placed(self, nodes: Iterable[Any]) -> Iterator[LateHook]:
        """torch tells which dict a node hook went into, not which node: ask the nodes for their dicts."""
        if not self._unplaced:
            return
        for node in nodes:
            for kind, found in hooks_on(node):
                for hooks, hook, number in self._unplaced:
                    if hooks is found:
                        yield LateHook(kind, node, 0, hook, number)


#: of the plans under way, on all threads: a hook may concern any of them.
_watched: list[HookChanges] = []
_ASKING = object()


class watching:
    """Collect the changes until the end of the block."""

    def __enter__(self) -> HookChanges:
        self._changes = HookChanges(threading.get_ident())
        _watched.append(self._changes)
        return self._changes

    def __exit__(self, *error: object) -> None:
        _watched.remove(self._changes)


def _watched_here() -> list[HookChanges]:
    me = threading.get_ident()
    return [changes for changes in _watched if changes.thread == me]


def _watch_only(before: list[HookChanges]) -> None:
    for changes in _watched_here():
        if changes not in before:
            _watched.remove(changes)


restore_after_errors(_watched_here, _watch_only)


def hooks_on(node: Any) -> Iterator[tuple[HookKind, Any]]:
    """The dictionaries of the hooks that were registered on `node` itself, or None for those without any."""
    registers = node.register_prehook, node.register_hook
    for kind, register in zip((HookKind.NODE_PRE, HookKind.NODE_POST), registers, strict=True):
        try:
            register(_ASKING)  # nothing is registered
        except Escape as found:
            yield kind, found.value
        else:
            raise AssertionError("torch registers node hooks in another way than it did")


def _registering(kind: HookKind, on_hook: OnHook) -> Handler:
    def register(original: Callable[..., Any], tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        handle = original(tensor, hook)
        if not isinstance(handle, RemovableHandle) or isinstance(tensor, FunctionalTensor):
            return handle  # a subclass registers by itself; of a trace, the real tensor has it
        on_hook(handle.hooks_dict_ref(), tensor)
        if _watched:
            edge = get_gradient_edge(tensor)
            for changes in tuple(_watched):
                changes.late.append(LateHook(kind, edge.node, edge.output_nr, hook, handle.id))
        return handle

    return register


def _registering_on_node(on_hook: OnHook) -> Handler:
    def register(original: Callable[..., Any], hooks: Any, hook: Any) -> Any:
        if hook is _ASKING:
            raise Escape(hooks)
        hooks, handle = original(hooks, hook)
        on_hook(hooks, None)
        for changes in tuple(_watched):
            changes._unplaced.append((hooks, hook, handle.id))
        return hooks, handle

    return register


def _removing(original: Callable[..., Any], handle: Any) -> None:
    if _watched:
        hooks = handle.hooks_dict_ref()
        hook = None if hooks is None else hooks.get(handle.id)
        if hook is not None:
            for changes in tuple(_watched):
                changes.went(hook, handle.id)
    original(handle)


def watch_hooks(on_hook: OnHook) -> None:
    """From here on, see the hooks that user code registers or removes while a plan runs, and have each
    dictionary `on_hook` that gets a hook, at any time."""
    handle("torch:Tensor.register_hook", _registering(HookKind.TENSOR_PRE, on_hook))
    handle("torch:Tensor.register_post_accumulate_grad_hook", _registering(HookKind.POST_ACCUMULATE, on_hook))
    handle("torch.autograd.function:_HookMixin._register_hook", _registering_on_node(on_hook))
    handle("torch.utils.hooks:RemovableHandle.remove", _removing)


def call_cpp_tensor_pre_hooks(hook: int, grad: torch.Tensor) -> torch.Tensor:
    """Call C++ hook number `hook` of the backward whose engine frame is alive."""
    result = engine_protocol.call_cpp_tensor_pre_hooks(hook, grad)
    assert isinstance(result, torch.Tensor)
    return result


def counts_other_hooks(hook: Any) -> bool:
    """Whether `hook` belongs to ``torch.autograd.graph.register_multi_grad_hook``."""
    function = getattr(hook, "func", hook)
    name = str(getattr(function, "__qualname__", ""))
    return (
        getattr(function, "__module__", "") == "torch.autograd.graph" and "register_multi_grad_hook" in name
    )


def has_waiting_hooks(values: Iterable[Any]) -> bool:
    """Whether one of `values` is a leaf with post-accumulate-grad hooks. They may free the gradient at once,
    as an optimizer in backward does, so that it matters how many gradients there are at a time."""
    return any(bool(value._post_accumulate_grad_hooks) for value in values if type(value) in PLAIN_CLASSES)
