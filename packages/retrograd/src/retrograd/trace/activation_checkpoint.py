"""Trace activation checkpoints, in a user's function and in a graph that Dynamo made.

In: a function under trace, or a graph module and its inputs. Out: a traced checkpoint runs its function once
and marks the nodes for recomputation in the backward (``meta["recompute"]``). It installs no saved-tensor
hooks and does not differentiate a second run. The partitioner then recomputes the marked nodes with the same
random numbers. The metadata of a graph module's nodes is copied to the nodes traced from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointFunction,
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    noop_context_fn,
)

from retrograd.errors import Refusal, not_representable
from retrograd.facts.patches import handled_here
from retrograd.facts.releases import CHECKPOINT, checkpoint_options, policy_context, redrawing
from retrograd.process import ThreadValue
from retrograd.trace.first_run import FirstRun
from retrograd.trace.functional import any_changed, mutations_of
from retrograd.trace.graph_tracer import recorded, tracer_here


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of the function under trace.

    Attributes:
        given: the function's inputs. A checkpoint must not mutate them.
        reenter: whether a checkpoint is reentrant and runs with grad enabled.
        groups: yields the number of each checkpoint.
    """

    given: Sequence[Any] = ()
    reenter: bool = False
    groups: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_checkpoints: ThreadValue[Checkpoints | None] = ThreadValue(None)


@contextmanager
def checkpoints_marked(given: Sequence[Any], first: FirstRun | None = None) -> Iterator[Checkpoints]:
    """Inside, on this thread, checkpoints run their function once and only mark its nodes for recomputation.

    Args:
        given: tensors whose mutation is visible outside the function. The caller may append to it during the
            run.
        first: the run of the function. Once it continues eagerly, its checkpoints run as in eager.

    Raises:
        Refusal: a checkpoint mutates one of these tensors. Eager repeats the mutation when it recomputes.
    """
    found = Checkpoints(given)

    def without_reentry(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if first is not None and first.hides("it calls a checkpoint"):
            yield from original(*first.real(args), **first.real(kwargs))  # its function runs once more
            return
        contexts, repeats_draws = checkpoint_options(*args, **kwargs)
        with _marked(args, repeats_draws, contexts):
            yield

    @contextmanager
    def reentrant(args: Sequence[Any], repeats_draws: bool) -> Iterator[None]:
        found.reenter |= torch.is_grad_enabled()
        with _marked(args, repeats_draws):
            yield

    with (
        _checkpoints.switched(found),
        handled_here(CHECKPOINT, without_reentry),
        checkpoints_inlined(reentrant, first),
    ):
        yield found


@contextmanager
def checkpoints_inlined(
    around: Callable[[Sequence[Any], bool], AbstractContextManager[None]] = lambda args, draws: nullcontext(),
    first: FirstRun | None = None,
) -> Iterator[None]:
    """Inside, on this thread, a reentrant checkpoint becomes part of the surrounding autograd graph.

    Args:
        around: makes a context for each checkpoint, from its arguments and whether it preserves the RNG
            state.
        first: as in `checkpoints_marked`.
    """

    def run(original: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Replaces ``CheckpointFunction.apply``. Grad is enabled only if an argument requires grad."""
        if first is not None and first.hides("it calls a checkpoint"):
            return original(function, preserve_rng_state, *args)
        wanted = any(map(_is_differentiable, args))
        with torch.set_grad_enabled(wanted), around(args, preserve_rng_state):
            if isinstance(getattr(function, "__self__", None), _Interpreter):
                return function(*args)  # Dynamo has turned its closure into arguments
            # Eager's checkpoint sums what its calls give to an argument, and hands on the sums in order. Of
            # nodes that are ready, the one made last runs first.
            alias = torch.ops.aten.alias.default
            own = [alias(arg) if _is_differentiable(arg) else arg for arg in reversed(args)]
            return function(*reversed(own))

    with handled_here("torch.utils.checkpoint:CheckpointFunction.apply", run):
        yield


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def draws_repeated() -> AbstractContextManager[None]:
    """Inside, the recomputation of a checkpoint in a Dynamo graph draws the same random numbers as its
    forward.

    Torch leaves that to Inductor, but here the graph runs uncompiled. Checkpoints that do not preserve the
    RNG state never get into a graph: `opaque_functions` breaks the graph there.
    """

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        given, named = redrawing(args, kwargs)
        return original(*given, **named)

    return handled_here(CHECKPOINT, run)


@contextmanager
def _marked(
    args: Sequence[Any],
    repeats_draws: bool,
    contexts: Callable[[], tuple[Any, Any]] | None = None,
    otherwise: CheckpointPolicy = CheckpointPolicy.MUST_RECOMPUTE,
) -> Iterator[None]:
    """Run one checkpoint. Mark its calls with its policy, and refuse effects that happen once in a graph but
    twice in eager.

    When eager recomputes a checkpoint, it repeats in-place mutations and, unless `repeats_draws`, draws other
    random numbers.

    Raises:
        Refusal: the checkpoint mutated its arguments or the traced function's inputs, or drew random numbers.
    """
    checkpoints = _checkpoints.get() or Checkpoints()
    marking, given = Marking(contexts, otherwise, next(checkpoints.groups)), checkpoints.given
    seen, count = [value for value in (*given, *args) if isinstance(value, torch.Tensor)], len(given)
    differentiable, before = torch.is_grad_enabled(), [mutations_of(value) for value in seen]
    tracer = tracer_here()
    draws = tracer.draws if tracer is not None else 0
    with marking:
        yield
    if differentiable and (any_changed(given[count:]) or [mutations_of(value) for value in seen] != before):
        raise Refusal("backward-effect", "a checkpoint in it changes a tensor, which its backward does again")
    if differentiable and not repeats_draws and tracer is not None and tracer.draws > draws:
        raise Refusal("backward-effect", "a checkpoint in it draws other random numbers in its backward")


class Marking(TorchDispatchMode):
    """Marks each call traced inside with the checkpoint's policy: save or recompute."""

    def __init__(
        self, contexts: Callable[[], tuple[Any, Any]] | None, otherwise: CheckpointPolicy, group: int
    ) -> None:
        super().__init__()
        self._group = group
        self._policy: Callable[..., Any] = lambda *args, **kwargs: otherwise
        if contexts is not None and contexts is not noop_context_fn:
            forward, _ = contexts()
            if not isinstance(forward, _CachingTorchDispatchMode):
                raise not_representable(
                    "a checkpoint has a context_fn that is no selective-checkpoint policy"
                )
            self._policy = forward.policy_fn

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        mode = get_proxy_mode()
        nodes: Any = mode.tracer.graph.nodes if mode is not None else ()
        before = len(nodes)
        result = func(*args, **kwargs)
        made = list(itertools.islice(reversed(nodes), len(nodes) - before))
        policy = self._policy(policy_context(result), func, *args, **kwargs)
        if isinstance(policy, bool):
            policy = CheckpointPolicy.MUST_SAVE if policy else CheckpointPolicy.PREFER_RECOMPUTE
        tracer = tracer_here()
        if tracer is None or "recompute" not in tracer.note:  # the graph's own mark takes precedence
            for node in made:  # the innermost checkpoint writes last and wins
                if node.op == "call_function":
                    node.meta["recompute"] = policy
                    node.meta.setdefault("ac_graph_id", self._group)  # eager recomputes the outermost whole
        return result


#: Functionalisation does not see the effect of this operator.
_RESIZE = torch.ops.inductor.resize_storage_bytes_
_REFUSED = (_RESIZE, _RESIZE.default)
#: Dynamo lowers an assignment to ``.data`` to several calls, the last of which is `_DATA_WRITTEN`, and a read
#: to `_DATA_READ`.
_DATA_WRITTEN, _DATA_READ = "_lower_version_count_by_1", "_get_data_attr"
#: ``meta`` key: the number of a call within a repeated block.
CALL_OF_BLOCK = "call_of_block"
#: ``meta`` keys that we copy from a call to the nodes traced from it.
HANDED_ON = (
    "stack_trace", "nn_module_stack", "source_fn_stack", "custom", "recompute", "ac_graph_id", CALL_OF_BLOCK,
)  # fmt: skip


def run_graph(gm: fx.GraphModule, args: Sequence[Any], graph: fx.Graph | None = None) -> Any:
    """Run `gm`, or another `graph` with the attributes of `gm`.

    Under a trace, stack traces, module paths and checkpoint policies are copied to the traced nodes. A Dynamo
    graph calls functions to enter and leave transforms of ``torch.func``. If a call in between raises, we
    close the open ones.
    """
    if get_proxy_mode() is None and not any(map(is_reentrant, gm.graph.nodes)):
        with draws_repeated():
            return gm(*args)
    interpreter = _Interpreter(gm, graph)
    depth, forward_mode = torch._C._functorch.get_dynamic_layer_stack_depth(), torch._C._is_fwd_grad_enabled()
    try:
        return interpreter.run(*args)
    finally:
        for level in reversed(interpreter.dual_levels):
            torch._C._exit_dual_level(level=level)
        torch._C._set_fwd_grad_enabled(forward_mode)
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def is_reentrant(node: fx.Node) -> bool:
    """Whether a node is a reentrant checkpoint, which is torch's default."""
    return node.target is tag_activation_checkpoint and _reenters(node.kwargs)


def _reenters(options: Mapping[str, Any]) -> bool:
    chosen = options.get("use_reentrant")
    return chosen is None or bool(chosen)


class _Interpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, graph: fx.Graph | None = None) -> None:
        super().__init__(gm, graph=graph)
        #: Open levels of forward-mode differentiation.
        self.dual_levels: list[int] = []

    def run_node(self, n: fx.Node) -> Any:
        with recorded(**{key: n.meta[key] for key in HANDED_ON if key in n.meta}):
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _REFUSED:
            raise not_representable(f"it calls {target}")
        if getattr(target, "__name__", "") == _DATA_WRITTEN:
            raise not_representable("it assigns to .data of a tensor")
        if getattr(target, "__name__", "") == _DATA_READ:
            return args[0].data  # a plain access, which `ClosureTensors` intercepts
        if target is not tag_activation_checkpoint:
            result = super().call_function(target, args, kwargs)
            if getattr(target, "__name__", "") == "_enter_dual_level":
                self.dual_levels.append(result)
            elif getattr(target, "__name__", "") == "_exit_dual_level":
                self.dual_levels.pop()
            return result
        body, *inputs = args
        contexts = body.meta.get("_checkpoint_context_fn")
        repeats_draws = kwargs.get("preserve_rng_state", True)
        if _reenters(kwargs):
            return CheckpointFunction.apply(_Interpreter(body).run, repeats_draws, *inputs)
        with _marked(inputs, repeats_draws, contexts, CheckpointPolicy.PREFER_RECOMPUTE):
            return _Interpreter(body).run(*inputs)
