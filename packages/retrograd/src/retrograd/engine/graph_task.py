"""Runs a plan inside one of torch's own backwards, and tracks hooks that change while plans run.

In: a function, and the request that it serves. Out: nothing. The function runs exactly once, on this thread
unless backwards are nested too deeply. While it runs, ``torch._C._current_graph_task_id()`` is set. Callbacks
from ``queue_callback`` run when the function has returned. A nested ``.backward()`` is reentrant, as in
eager. Grad mode, ``keep_graph`` and the validity of reentrant checkpointing are those of the request.

In: hooks that any thread registers or removes, seen at torch's Python entry points. Out: `HookChanges`. Eager
looks up hooks when it reaches a node. A plan knows only the hooks that existed when its backward was
collected, so we must tell it about later changes.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._dynamo import compiled_autograd as engine_protocol
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.hooks import RemovableHandle

from retrograd.engine.collection import call_engine
from retrograd.engine.request import EngineRequest, LiveBackward, edge_of, leaf_of
from retrograd.engine.stock_entry import window
from retrograd.errors import Escape
from retrograd.facts.patches import Handler, handle
from retrograd.facts.releases import unseen
from retrograd.graph.backward_graph import HookKind
from retrograd.process import ThreadValue, restore_after_errors
from retrograd.runtime.modes import without_torch_functions
from retrograd.runtime.tensor import PLAIN_CLASSES

#: Receives a dictionary of hooks, and the node whose gradient its hooks receive; None if the dictionary
#: belongs to a node itself.
OnHook = Callable[[Any, Any], None]

_Edge = tuple[int, dict[str, Any], int]


class _Body(threading.local):
    """The functions that run on this thread inside a graph task, innermost last."""

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

    If backwards are nested too deeply (torch's ``MAX_DEPTH``), the engine runs the inner one on another
    thread while the calling thread waits.
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
    """Run `body` as the only node of a backward with the options of `request`."""
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
    """Return `body()`, run where autograd nodes called by hand compute all their gradients.

    Inside a backward, a node computes only the gradients that this backward needs
    (``Node::task_should_compute_output``).
    """
    if torch._C._current_graph_task_id() == -1:
        return body()
    found: list[Any] = []
    # With create_graph, torch would warn of gradients that this request does not accumulate.
    request = EngineRequest((), (), True, False, accumulate_grad=True)

    def in_grad_mode() -> None:
        with torch.set_grad_enabled(create_graph):
            found.append(body())

    levels = torch._C._vmapmode_increment_nesting()
    try:  # torch refuses a nested backward inside its older vmap, which ``is_grads_batched`` uses
        for _ in range(levels):
            torch._C._vmapmode_decrement_nesting()
        run_in_graph_task(in_grad_mode, request)
    finally:
        for _ in range(levels - 1):
            torch._C._vmapmode_increment_nesting()
    return found[0]


@dataclass(frozen=True, eq=False)
class LateHook:
    """A hook registered on gradient `slot` of `node` while a plan runs.

    `number` is the id of its handle, or None if it has no handle. torch does not tell us on which node of C++
    a hook is registered: `node` is None until `HookChanges.take` finds the node whose hooks are `hooks`.
    `is_first` tells whether no hook of this kind had ever been registered on the node.
    """

    kind: HookKind
    node: Any
    slot: int
    hook: Callable[..., Any]
    number: int | None = None
    hooks: Any = None
    is_first: bool = False


@dataclass(frozen=True)
class RemovedHook:
    """A hook that was removed while a plan runs.

    Attributes:
        hook: the function.
        hooks: the dictionary that held it.
        edge: the node whose gradient the hook received, as its sequence number and its metadata, and which
            gradient; None for a leaf, for a hook of a node, and for a hook registered before we observed
            registrations.
        place: how many registrations of the same function came before it in the dictionary.
    """

    hook: Callable[..., Any]
    hooks: Any
    edge: _Edge | None
    place: int

    def was_on(self, node: Any, slot: int | None) -> bool:
        """Whether `node` called the hook; with gradient `slot`, if it was a tensor's."""
        if self.edge is not None:
            number, metadata, own = self.edge
            return (node._sequence_nr(), slot) == (number, own) and node.metadata is metadata
        leaf: Any = leaf_of(node)
        of_leaf = () if leaf is None else (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
        return any(found is self.hooks for found in (*of_leaf, *(found for _, found in hooks_on(node))))


#: For each handle of a hook on a tensor that is no leaf: the sequence number and the metadata of the tensor's
#: node, and which of the node's outputs the tensor is. Nodes of two threads may have one number. We cannot
#: hold the node, since a handle may outlive its graph; the dictionary of its metadata identifies it.
_edges: weakref.WeakKeyDictionary[RemovableHandle, _Edge] = weakref.WeakKeyDictionary()
_edge_of = without_torch_functions(edge_of)  # modes of the user must not see what we read


@dataclass(eq=False)
class HookChanges:
    """Hooks registered and removed since the last `take`, for a plan of `backward` on this `thread`. Those on
    nodes of other graphs are left out, such as what a checkpoint's recomputation registers."""

    thread: int = 0
    backward: LiveBackward | None = None
    late: list[LateHook] = field(default_factory=list)
    removed: list[RemovedHook] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.late or self.removed)

    def take(self, nodes: Iterable[Any]) -> tuple[list[LateHook], list[RemovedHook]]:
        """Return the late and the removed hooks, and clear them. `nodes` are searched for late node hooks."""
        late, removed = self.late, self.removed
        self.late, self.removed = [], []
        owners: dict[int, tuple[HookKind, Any]] = {}
        if any(one.node is None for one in late):
            owners = {id(found): (kind, node) for node in nodes for kind, found in hooks_on(node)}
        for place, one in enumerate(late):
            if one.node is None and id(one.hooks) in owners:
                kind, node = owners[id(one.hooks)]
                late[place] = replace(one, kind=kind, node=node)
        return [one for one in late if one.node is not None], removed

    def came(self, late: LateHook) -> None:
        """Record a hook that was registered."""
        if self.backward is None or late.node is None or self.backward.has(late.node):
            self.late.append(late)

    def went(self, gone: RemovedHook, number: int) -> None:
        """Record that the hook whose handle has this number was removed. If it was registered since the last
        `take`, the two cancel; of the first hook on a node, one that does nothing remains. We compare the
        hook as well as its number: torch counts handles without a lock, so two threads may get one number."""
        cancelled = [late for late in self.late if (late.hook, late.number) == (gone.hook, number)]
        for late in cancelled:
            self.late.remove(late)
            if late.is_first:
                self.late.append(replace(late, hook=lambda *_: None))
        if cancelled:
            return
        if self.backward is None or gone.edge is None or self.backward.has_numbered(gone.edge[0]):
            self.removed.append(gone)


_NOTHING = nullcontext()

#: For the running plans of all threads: a hook may concern any of them.
_watched: list[HookChanges] = []
_ASKING = object()


class watching:
    """Collect the hook changes of a backward until the end of the block."""

    def __init__(self, backward: LiveBackward) -> None:
        self._backward = backward

    def __enter__(self) -> HookChanges:
        self._changes = HookChanges(threading.get_ident(), self._backward)
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
    """The dictionaries of the hooks registered on `node` itself; None for a kind that has no hooks."""
    registers = node.register_prehook, node.register_hook
    for kind, register in zip((HookKind.NODE_PRE, HookKind.NODE_POST), registers, strict=True):
        try:
            register(_ASKING)  # our handler raises, so this registers nothing
        except Escape as found:
            yield kind, found.value
        else:
            raise AssertionError("torch registers node hooks in another way than it did")


def _came(*hook: Any) -> None:
    """Tell all running plans of a hook. The arguments are those of `LateHook`."""
    for changes in tuple(_watched):
        changes.came(LateHook(*hook))


#: what is called with every dictionary that receives a hook
_observers: list[OnHook] = []


def _tell(hooks: Any, node: Any) -> None:
    for on_hook in _observers:
        on_hook(hooks, node)


def _registering(kind: HookKind) -> Handler:
    def register(original: Callable[..., Any], tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        handle = original(tensor, hook)
        if not isinstance(handle, RemovableHandle) or isinstance(tensor, FunctionalTensor):
            return handle  # a subclass registers by itself; during a trace, the real tensor holds the hook
        node, slot = _edge_of(tensor)
        hooks = handle.hooks_dict_ref()  # None for a view written through its base: its history is made anew
        if node is not None and hooks is not None:
            _tell(hooks, node)
            if leaf_of(node) is None:
                _edges[handle] = node._sequence_nr(), node.metadata, slot
            _came(kind, node, slot, hook, handle.id)
        return handle

    return register


def _registering_on_node(original: Callable[..., Any], hooks: Any, hook: Any) -> Any:
    if hook is _ASKING:
        raise Escape(hooks)
    is_first = hooks is None
    hooks, handle = original(hooks, hook)
    _tell(hooks, None)
    _came(*_node_here.get(), 0, hook, handle.id, hooks, is_first)
    return hooks, handle


#: the node of Python on which this thread registers a hook, and the hook's kind
_node_here: ThreadValue[tuple[HookKind, Any]] = ThreadValue((HookKind.NODE_POST, None))


def _registering_on_python_node(kind: HookKind) -> Handler:
    def register(original: Callable[..., Any], node: Any, hook: Any) -> Any:
        with _node_here.switched((kind, node)) if _watched else _NOTHING:
            return original(node, hook)

    return register


def _retaining(original: Callable[..., Any], tensor: torch.Tensor) -> None:
    before = bool(_watched) and _retains_grad(tensor)
    original(tensor)
    if _watched and not before and _retains_grad(tensor):
        edge = _edge_of(tensor)
        _came(HookKind.RETAIN_GRAD, *edge, functools.partial(_retain, weakref.ref(tensor), edge))


@without_torch_functions
def _retains_grad(tensor: torch.Tensor) -> bool:
    return tensor.retains_grad


@without_torch_functions
def _retain(retaining: weakref.ref[torch.Tensor], edge: tuple[Any, int], grad: torch.Tensor | None) -> None:
    """What the engine's own hook does (``VariableHooks::retain_grad``). An in-place change takes it from
    `edge` to the tensor's new node."""
    tensor = retaining()
    if tensor is None or grad is None or edge_of(tensor) != edge:
        return
    layout = torch.preserve_format if grad.is_sparse else torch.contiguous_format
    tensor.grad = grad.clone(memory_format=layout) if tensor.grad is None else tensor.grad + grad


def _removing(original: Callable[..., Any], handle: Any) -> None:
    if _watched:
        hooks = handle.hooks_dict_ref()
        hook = None if hooks is None else hooks.get(handle.id)
        if hook is not None:
            place = [number for number, one in hooks.items() if one is hook].index(handle.id)
            gone = RemovedHook(hook, hooks, _edges.get(handle), place)
            for changes in tuple(_watched):
                changes.went(gone, handle.id)
    original(handle)


def watch_hooks(on_hook: OnHook) -> None:
    """From now on, observe the hooks that user code registers or removes while a plan runs. Also call
    `on_hook` with every dictionary that receives a hook, at any time."""
    _observers.append(on_hook)
    handle("torch:Tensor.register_hook", _registering(HookKind.TENSOR_PRE))
    handle("torch:Tensor.register_post_accumulate_grad_hook", _registering(HookKind.POST_ACCUMULATE))
    handle("torch.autograd.function:_HookMixin._register_hook", _registering_on_node)
    for kind, name in (HookKind.NODE_PRE, "register_prehook"), (HookKind.NODE_POST, "register_hook"):
        handle(f"torch.autograd.function:BackwardCFunction.{name}", _registering_on_python_node(kind))
    handle("torch:Tensor.retain_grad", _retaining)
    handle("torch.utils.hooks:RemovableHandle.remove", _removing)


def call_cpp_tensor_pre_hooks(hook: int, grad: torch.Tensor) -> torch.Tensor:
    """Call C++ hook number `hook` of the backward whose engine frame is on the stack."""
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
    """Whether any of `values` is a leaf with post-accumulate-grad hooks. Such a hook may free the gradient at
    once (optimizer in backward), so the number of gradients alive at a time matters."""
    return any(bool(value._post_accumulate_grad_hooks) for value in values if type(value) in PLAIN_CLASSES)
