"""Keeps calls intact that Dynamo would decompose or trace wrongly: Functions, checkpoints, fused operators.

In: each call of ``apply`` that Dynamo traces for a backend that asks to preserve eager behaviour. Out: one
node of Dynamo's graph, if the Function does the same in each run; else a graph break around the call, which
then runs as in eager.

Dynamo traces the backward of a Function once: with all gradients defined, without history, and without the
engine's checks. That loses what the Function tells autograd (``mark_dirty``, ``set_materialize_grads``), what
its backward mutates, what it reads at run time, a second derivative, and eager's errors.

In: each checkpoint that Dynamo traces for such a backend. Out: a graph break around those that change a
tensor in place, such as the statistics of a batch norm in training, and those that draw random numbers
without ``preserve_rng_state``. When eager's backward runs the function a second time, the function makes the
change again, and draws other numbers; a graph does both only once. The graph also breaks around a reentrant
checkpoint none of whose arguments requires grad, because Dynamo makes arguments of what its code reads.

In: each call of ``addcdiv``, ``addcmul_`` and the like that Dynamo traces for such a backend. Out: one node
of its graph for each. A product and a sum in two operations round differently from the one kernel that eager
runs. Dynamo decomposes these calls to avoid ``.item()`` on a tensor that is passed as a number. We leave
calls with such a tensor to Dynamo.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.misc import produce_trampoline_autograd_apply
from torch._guards import Guard
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses import FakeTensor

from retrograd.dynamo.eager_breaks import break_graph, differentiate, keeps_eager, sample
from retrograd.engine import PurityAnalysis, methods_of, writes_in_place
from retrograd.errors import Refusal
from retrograd.facts import functions
from retrograd.facts.patches import handle, hidden_from_dynamo
from retrograd.graph.operator_effects import Watch, asynchronous_refused
from retrograd.runtime.tensor import storage_of, tensors_in
from retrograd.trace import any_changed, fake_mode_of, functional_mode, is_reentrant, to_functional

#: types of arguments that are constants
_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


def keep_calls_whole() -> None:
    """Install the patches. They affect only backends that ask to preserve eager behaviour."""
    handle("torch._dynamo.variables.misc:AutogradFunctionVariable.call_apply", _apply)
    name = "torch._dynamo.variables.higher_order_ops:CheckpointHigherOrderVariable._call_function"
    handle(name, _checkpoint)
    handle(_HANDLERS, _handlers)
    handle(_METHOD, _call_method)


def _apply(original: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Replaces Dynamo's translation of ``Function.apply(*args, **kwargs)``."""
    if not keeps_eager(tx) or not _is_recorded([*args, *kwargs.values()]):
        return original(variable, tx, args, kwargs)
    function = variable.fn_cls
    reading = PurityAnalysis.of(function)
    reason = (
        ("a function mode, or a default device, is active" if _is_in_function_mode(tx) else None)
        or _why_not_a_node(variable, args, kwargs)
        or reading.reason
        or _why_unlike_eager(function, args)
    )
    if reason is None:
        _guard(variable, reading)
        target = produce_trampoline_autograd_apply(function)
        proxies = tuple([arg.as_proxy() for arg in args])
        return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", target, proxies, {}))
    for method in methods_of(function):
        hidden_from_dynamo(method)
    name = function.__qualname__
    what = "autograd.Function that has to run as it is"
    return break_graph(what, f"{name}.apply", f"{name} is kept whole: {reason}.")


def _is_in_function_mode(tx: Any) -> bool:
    """Whether a function mode of the program is active, or is answering a call."""
    state = tx.symbolic_torch_function_state
    return state.cur_mode is not None or state.in_torch_function_mode()


def _is_recorded(values: Sequence[Any]) -> bool:
    """Whether autograd, or a functorch transform, sees the call. If not, only the forward matters."""
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    return torch.is_grad_enabled() and any(
        value.is_tensor() and value.requires_grad is not False for value in values
    )


def _why_not_a_node(variable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    if torch._C._functorch.maybe_current_level() is not None:
        return "a functorch transform is around it"
    if kwargs:
        return "it is called with keyword arguments"
    if variable.source is None:
        return "its class is made anew in each call"
    return None if all(map(_is_plain, args)) else "it is given what is neither a tensor nor a constant"


def _is_plain(variable: Any) -> bool:
    if variable.is_tensor():
        return isinstance(_fake(variable), FakeTensor)
    return bool(variable.is_python_constant()) and isinstance(variable.as_python_constant(), _CONSTANTS)


def _fake(variable: Any) -> Any:
    return variable.as_proxy().node.meta["example_value"]


def _sample(variable: Any) -> Any:
    """An argument as a new leaf, still fake."""
    return sample(_fake(variable)) if variable.is_tensor() else variable.as_python_constant()


def _why_unlike_eager(function: Any, variables: Sequence[Any]) -> str | None:
    """Run the Function on fake tensors. Return why it cannot be one node of a graph, or None."""
    mode = next(fake_mode_of(_fake(variable)) for variable in variables if variable.is_tensor())
    assert mode is not None
    try:
        with mode, torch.enable_grad(), asynchronous_refused():
            return _why_unlike(function, [_sample(variable) for variable in variables])
    except Refusal as refusal:
        return str(refusal)
    except Exception as error:
        return f"on fake tensors it raises {type(error).__name__}"


def _why_unlike(function: Any, args: Sequence[Any]) -> str | None:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    before = [tensor._version for tensor in tensors]
    result = function.apply(*args)
    given_back = [out for out in (result if isinstance(result, tuple) else (result,)) if out is not None]
    if not all(isinstance(out, torch.Tensor) for out in given_back):
        return "it returns what is no tensor"
    if [tensor._version for tensor in tensors] != before:
        return "its forward changes what it is given"
    if any(_shares_memory(out, tensors) for out in given_back):
        return "it returns what it was given, or a view of it"
    roots = [out for out in given_back if out.requires_grad]
    kept = [value for root in roots for value in tensors_in(dict(vars(root.grad_fn)))]
    if any(_shares_memory(value, [*tensors, *given_back]) for value in kept):
        return "it keeps a tensor of the caller's without save_for_backward"
    differentiate(roots, tensors)
    return None


def _shares_memory(one: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return storage_of(one) in map(storage_of, others)


def _guard(variable: Any, reading: PurityAnalysis) -> None:
    """Have Dynamo trace again if the Function gets other methods, or a name that they use gets another
    value."""
    for name in ("forward", "backward", "setup_context"):
        if inspect.isfunction(getattr(variable.fn_cls, name)):
            install_guard(AttrSource(variable.source, name).make_guard(GuardBuilder.CLOSURE_MATCH))
    if reading.helpers:
        install_guard(Guard(variable.source, functools.partial(_names_hold, reading)))


def _names_hold(reading: PurityAnalysis, builder: Any, guard: Guard) -> None:
    parts = [f"what {guard.name} calls"]
    builder.get_guard_manager(guard).add_lambda_guard(
        lambda _: reading.still_holds(), parts, guard.user_stack
    )


# checkpoints

#: the options that a reentrant checkpoint takes too
_TAKEN_BY_ALL = "use_reentrant", "preserve_rng_state"


def _checkpoint(original: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Replaces Dynamo's translation of ``checkpoint(...)``."""
    if _is_in_function_mode(tx) and keeps_eager(tx):
        lost = "A function mode, or a default device, is active. What is inside would be traced without it."
        break_graph("checkpoint in a function mode", "torch.utils.checkpoint.checkpoint", lost)
    named = {*kwargs}.difference(_TAKEN_BY_ALL)
    try:
        result = original(variable, tx, args, kwargs)
    except NotImplementedError as error:
        if not keeps_eager(tx):
            raise
        break_graph("checkpoint that Dynamo does not know", "torch.utils.checkpoint.checkpoint", str(error))
    if keeps_eager(tx) and (why := _why_not_in_graph(tx, args[1:], named)) is not None:
        break_graph("checkpoint that cannot be repeated", "torch.utils.checkpoint.checkpoint", why)
    return result


def _why_not_in_graph(tx: Any, given: Sequence[Any], named: set[str]) -> str | None:
    """Why eager runs the checkpoint that was traced last otherwise than a graph does; None if it does not."""
    graph: fx.Graph = tx.output.current_tracer.graph
    *_, node = graph.find_nodes(op="call_function", target=tag_activation_checkpoint)
    if is_reentrant(node) and named:
        return "A reentrant checkpoint takes no argument by name. It raises an error."
    if not torch.is_grad_enabled():
        return None
    body, *inputs = node.args
    examples = [arg.meta["example_value"] if isinstance(arg, fx.Node) else arg for arg in inputs]
    tensors = [one for one in given if isinstance(one, TensorVariable)]
    reads = any(map(_is_differentiable, examples))  # the arguments, and what its code reads otherwise
    if is_reentrant(node) and reads and not any(one.requires_grad for one in tensors):
        return "It is reentrant and no argument requires grad. So what it reads gets no gradient."
    return _why_not_repeatable(tx, node, body, examples)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _why_not_repeatable(tx: Any, node: fx.Node, body: Any, examples: Sequence[Any]) -> str | None:
    """Why a checkpoint does something else in its second run; None if it does not."""
    module = tx.output.nn_modules[body.target]
    called: list[Any] = []
    try:
        with tx.fake_mode, torch.no_grad(), functional_mode(), Watch(lambda func, *_: called.append(func)):
            given = [to_functional(one) if isinstance(one, torch.Tensor) else one for one in examples]
            fx.Interpreter(module).run(*given)
            is_changed = any_changed(given)
    except Exception:
        return None  # the backend will report what it cannot compile
    if is_changed:
        return "It changes a tensor, and changes it again when the backward computes it once more."
    draws = any(torch.Tag.nondeterministic_seeded in func.tags for func in called)
    if draws and not node.kwargs.get("preserve_rng_state", True):
        return "It draws other random numbers when the backward computes it once more."
    return None


# operators

_HANDLERS = "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers"
_METHOD = "torch._dynamo.variables.tensor:TensorVariable.call_method"


@functools.cache
def _handlers(original: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """Replaces Dynamo's table of handlers for known functions. A handler that returns None puts the call into
    the graph as it is."""
    known, decomposed = original(), [getattr(torch, name) for name in functions("taken_apart")]

    def whole(fn: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _is_kept(tx, args[2:], kwargs, fn) else known[fn](variable, tx, *args, **kwargs)

    return {**known, **{fn: functools.partial(whole, fn) for fn in decomposed if fn in known}}


def _call_method(original: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Replaces Dynamo's translation of a tensor method. Dynamo registers a hook on a graph input after the
    graph."""
    if name == "register_hook" and variable.source and not tx.one_graph and keeps_eager(tx):
        hook = getattr(args[0], "fn", None) or getattr(args[0], "code", None)
        if writes_in_place(getattr(hook, "value", hook)):
            break_graph("hook that changes a gradient in place", str(hook), "The graph behind it must know.")
    if name == "numpy" and variable.requires_grad and torch.is_grad_enabled() and keeps_eager(tx):
        break_graph("method that refuses a tensor that requires grad", name, "It raises an error.")
    if name not in functions("methods_taken_apart") or not _is_kept(tx, (), kwargs):
        return original(variable, tx, name, args, kwargs)
    with dynamo_config.patch(enable_dynamo_decompositions=False):
        return original(variable, tx, name, args, kwargs)


def _is_kept(tx: Any, behind: Any, kwargs: Any, fn: Any = None) -> bool:
    """Whether no tensor is passed as a number, so that the call stays intact. For ``_foreach_lerp_``, that
    would be one of the arguments `behind`."""
    numbers = [*kwargs.values(), *(behind if fn is torch._foreach_lerp_ else ())]
    return not any(isinstance(number, TensorVariable) for number in numbers) and keeps_eager(tx)
