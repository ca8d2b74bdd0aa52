"""Preserves eager behaviour that Dynamo loses before it calls a backend, for backends that ask for it.

In: Dynamo's translator, its guards, and the nodes that it runs on fake tensors. Out: whether the backend asks
to preserve eager behaviour, and graph breaks and guards that do so:

- An operation that raises on fake tensors is left to Python. So everything that eager does before the error
  is done, and the program gets the error that it may expect. With ``fullgraph``, Dynamo's own error is
  raised.
- An operation that may raise at run time is left to Python too, if code of the program catches the error.
- So is a custom operator whose backward raises on fake tensors, because it reads values.
- A hook that is set on a module after Dynamo has traced a call of the module fails a guard. Dynamo leaves
  that open to save time: with a guard on each module, it no longer skips the unchanged parts of a module. So
  we add one guard for the whole frame. It inspects the modules only after some module hook has been set in
  the process.
- A parameter of an optimizer keeps its class. Dynamo guards its address and puts it into the graph as a plain
  tensor, for which ``isinstance`` is false.

`opaque_functions` preserves each ``autograd.Function`` in the same way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import fx
from torch._dynamo import exc, mark_static_address
from torch._dynamo.utils import get_static_address_type
from torch._guards import Guard
from torch.nn.modules import module as all_modules

from retrograd.aot.modules import HOOKS_OF_A_MODULE, hooks_of_all_modules
from retrograd.errors import first_line
from retrograd.facts import functions
from retrograd.facts.patches import handle
from retrograd.facts.releases import raised_on_fakes
from retrograd.graph.fx import OF_TORCH
from retrograd.graph.operator_effects import (
    OF_CHECKS,
    OF_THE_USER,
    OF_VALUES,
    Errors,
    Watch,
    asynchronous_refused,
    errors_by_value,
)
from retrograd.graph.structure import is_same
from retrograd.runtime import pytree
from retrograd.runtime.except_clauses import catches
from retrograd.runtime.tensor import tensors_in

_RAISED = raised_on_fakes(exc)

#: how many module hooks were set in this process
_set = 0

_SETTERS = ("register_forward", "register_full_backward", "register_backward", "register_module_")

_NAMES_OF_HOOKS = tuple(f".{name}" for name in HOOKS_OF_A_MODULE)


def keeps_eager(tx: Any) -> bool:
    """Whether the backend that Dynamo traces for asks to preserve eager behaviour."""
    return backend_keeps_eager(tx.output.compiler_fn)


def backend_keeps_eager(compiler: Any) -> bool:
    """Whether the backend has a method ``keeps_eager`` that returns True for the user's options."""
    options: Mapping[str, Any] = {}
    while True:
        if isinstance(compiler, functools.partial):
            options = compiler.keywords.get("options") or options
            compiler = compiler.func
        elif hasattr(compiler, "_torchdynamo_orig_backend"):
            compiler = compiler._torchdynamo_orig_backend
        elif isinstance(compiler, torch._TorchCompileWrapper):
            options = compiler.kwargs.get("options") or options
            compiler = compiler.compiler_fn
        else:
            asked = getattr(compiler, "keeps_eager", None)
            return asked is not None and bool(asked(options))


def break_graph(what: str, where: str, why: str) -> NoReturn:
    """End the graph before this point. Python runs the call.

    Args:
        what: a heading without details.
        where: the call.
        why: a sentence.

    Raises:
        Unsupported: Dynamo's request for a graph break. With ``fullgraph`` it becomes the user's error.
    """
    hints = ["options={'stock_dynamo': True} leaves it to Dynamo, which differs from eager there."]
    exc.unimplemented(gb_type=what, context=where, explanation=why, hints=hints)


def watch_dynamo() -> None:
    """From now on, errors are left to eager, tensors keep their class, and each module hook is counted when
    it is set."""
    handle("torch.utils.hooks:RemovableHandle.__init__", _made)
    handle("torch._dynamo.utils:_get_fake_value_impl", _fake_value)
    handle("torch._dynamo.symbolic_convert:_detect_and_normalize_assert_statement", _assertion)
    handle("torch._dynamo.variables.builder:VariableBuilder.wrap_tensor", _wrap_tensor)


def _made(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Count a hook if it is a module hook: functions of one file of torch set all kinds of them."""
    global _set
    setter = sys._getframe(2)
    if setter.f_globals is vars(all_modules) and setter.f_code.co_name.startswith(_SETTERS):
        _set += 1
    original(*args, **kwargs)


def guard_module_hooks(guards: Any) -> None:
    """Add a guard if `guards` contains guards on module hooks. Dynamo guards the code and cells of the hooks
    that it has seen, but not that there are no others, and in torch 2.11 not the defaults of their
    parameters."""
    named = {guard.name: guard for guard in guards if guard.name.endswith(_NAMES_OF_HOOKS)}
    if found := [*named.values()]:
        guards.add(Guard(found[0].originating_source, functools.partial(_guard_hooks, found)))


def _guard_hooks(found: Sequence[Guard], builder: Any, guard: Guard) -> None:
    """Build the guard. The backend has compiled by now, and may have set hooks: under a memory budget, torch
    counts operations with global module hooks."""
    hooks = _Hooks([builder.get(one) for one in found])
    builder.guard_manager.root.add_lambda_guard(hooks, ["the hooks of modules"], guard.user_stack)


class _Hooks:
    """Checks that modules have the same hooks as now.

    Args:
        dictionaries: the dictionaries that hold the hooks.
    """

    def __init__(self, dictionaries: Sequence[Any]) -> None:
        self._known, self._set = [(ref(each), _defaults(each)) for each in dictionaries], _set
        self._of_all = hooks_of_all_modules()

    def __call__(self, _: object) -> bool:
        if self._set != _set:
            if not all(is_same(_defaults(each()), defaults) for each, defaults in self._known):
                return False
            self._set = _set
        return hooks_of_all_modules() == self._of_all


def _defaults(hooks: Mapping[int, Any] | None) -> list[Any]:
    """The number of hooks, and the defaults of their parameters."""
    found: list[Any] = [None if hooks is None else len(hooks)]
    for hook in (hooks or {}).values():
        by_name = getattr(hook, "__kwdefaults__", None) or {}
        found += [*(getattr(hook, "__defaults__", None) or ()), *by_name.values()]
    return found


def _fake_value(original: Callable[..., Any], node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    if (errors := _caught_errors(node, tx.output.current_tx)) and keeps_eager(tx):
        text = f"It may raise {errors.classes[0].__name__} when it runs, and the program catches errors here."
        break_graph("operator whose error is caught", str(node.target), text)
    try:
        value = original(node, tx, *args, **kwargs)
    except _RAISED as error:
        if tx.one_graph or not keeps_eager(tx):
            raise
        text = str(error).partition("\n\n")[0]
        break_graph("operation that raises on fake tensors", str(node.target), text)
    if (why := _why_not_differentiable(node, tx)) is not None:
        break_graph("operator whose backward raises on fake tensors", str(node.target), why)
    return value


def _caught_errors(node: Any, tx: Any) -> Errors | None:
    """The errors that a call may raise at run time, if code of the program around it catches one of them."""
    if node.op not in ("call_function", "call_method") or not (
        _is_caught(tx, OF_THE_USER) or _is_caught(tx, OF_CHECKS)
    ):
        return None
    return next((errors for errors in _errors(node, tx) if _is_caught(tx, errors)), None)


def _is_caught(tx: Any, errors: Errors) -> bool:
    """Whether one of `errors` reaches a ``try`` block or a context manager of the program, in a function that
    is being traced."""
    while tx is not None:
        if not all(map(_is_of_torch, tx.active_generic_context_managers)):
            return True
        if catches(tx.current_instruction, tx.instructions, tx.f_globals, errors):
            return True
        tx = tx.parent
    return False


def _is_of_torch(manager: Any) -> bool:
    return type(manager.cm_obj).__module__.startswith("torch.")


def _errors(node: Any, tx: Any) -> list[Errors]:
    """The errors that the operators in a call may raise. We run the call on fake tensors to find them."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in functions("unchecked"):
        return [OF_VALUES]
    found: list[Errors | None] = []
    watch = Watch(lambda *call: found.append(errors_by_value(*call)))
    with suppress(Exception):  # the trace itself will report the error
        with tx.fake_mode, torch.no_grad(), watch:
            args, kwargs = pytree.tree_map(_empty, _given(node))
            called = getattr(args[0], name) if node.op == "call_method" else node.target
            called(*(args[1:] if node.op == "call_method" else args), **kwargs)
    return [errors for errors in found if errors is not None]


def _empty(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


def _given(node: Any) -> tuple[Any, Any]:
    """The arguments of a node: fake tensors and other values."""
    return fx.map_arg((node.args, node.kwargs), lambda value: value.meta["example_value"])


def _assertion(original: Callable[..., bool], tx: Any, *args: Any) -> bool:
    """Whether Dynamo turns an ``assert`` statement into an operator. If not, the graph breaks and Python runs
    the statement."""
    if not original(tx, *args):
        return False
    if not keeps_eager(tx) or (tx.one_graph and not _is_caught(tx, OF_CHECKS)):
        return True
    tx.pop()  # the error text
    return False


#: what the backward raised, by operator and by which arguments require grad
_raised_by: dict[Hashable, str | None] = {}


def _why_not_differentiable(node: Any, tx: Any) -> str | None:
    """The error that the backward of a custom operator raises on fake tensors; None if it raises none."""
    target = node.target
    is_operator = isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    if not is_operator or str(target).partition(".")[0] in OF_TORCH or tx.one_graph:
        return None
    given = _given(node)
    asked = tuple(value.requires_grad for value in tensors_in(given))
    if not (torch.is_grad_enabled() and any(asked) and keeps_eager(tx)):
        return None
    if (target, asked) not in _raised_by:
        with tx.fake_mode, torch.enable_grad(), asynchronous_refused():
            _raised_by[target, asked] = _raised_backwards(target, *pytree.tree_map(sample, given))
    return _raised_by[target, asked]


def sample(value: Any) -> Any:
    """A new leaf like a fake tensor. Other values are returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        return torch.empty_like(value).requires_grad_(value.requires_grad)


def differentiate(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Run the backward from `results` to the leaves `given`, if there is one, and drop the gradients.

    Raises:
        Exception: whatever the backward raises.
    """
    roots = [value for value in results if value.requires_grad]
    leaves = [value for value in given if value.requires_grad]
    if roots:
        torch.autograd.grad(roots, leaves, [*map(torch.empty_like, roots)], allow_unused=True)


def _raised_backwards(operator: Any, args: Any, kwargs: Any) -> str | None:
    results = tensors_in(operator(*args, **kwargs))
    try:
        differentiate(results, tensors_in((args, kwargs)))
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _wrap_tensor(original: Callable[..., Any], builder: Any, value: torch.Tensor) -> Any:
    """Make a tensor of a custom class a graph input, wherever the program stores it."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain and get_static_address_type(value) == "guarded" and keeps_eager(builder.tx):
        mark_static_address(value, guard=False)
    return original(builder, value)
