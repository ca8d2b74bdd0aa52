"""Turn a function of modules and pytrees into a function of flat inputs.

`ModuleState`. In: modules, and objects of plain classes. Out: the modules' parameters and buffers (a tied one
once). It can replace them during a call, and checks that what a capture relies on has not changed: structure,
``training`` flags, hooks, and attributes (see `aot.holdings`).

`FlatCall`. In: a function, a `ModuleState`, and how the arguments are nested. Out: a callable on flat inputs,
with a name and a kind for each input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from retrograd.aot.holdings import Holdings
from retrograd.aot.tracer_leaks import may_hide, unchanged
from retrograd.errors import CaptureError, not_representable
from retrograd.graph.joint import PrimalKind
from retrograd.runtime import pytree
from retrograd.runtime.subclass import is_wrapper
from retrograd.trace import FirstRun

#: the dictionaries in which a module stores the hooks that run when it is called.
HOOKS_OF_A_MODULE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS_OF_A_MODULE)


def hooks_of_all_modules() -> list[int]:
    """The keys of all global module hooks."""
    return [key for name in _GLOBAL_HOOKS for key in getattr(torch_module, name)]


class ModuleState:
    """The tensors and settings of some modules, and the attributes of other objects.

    Args:
        given: modules, and other objects. The modules that these hold belong to it, too.

    Attributes:
        names, kinds, tensors: the name, kind and value of each tensor; parameters come first.
        places: for each tensor, the dictionaries that hold it, with its key in each.
        token: an input that a guard checks by identity, in place of this state.

    Raises:
        CaptureError: a parameter or buffer is not initialised yet.
    """

    names: tuple[str, ...]
    kinds: tuple[PrimalKind, ...]
    tensors: tuple[torch.Tensor, ...]
    places: tuple[Sequence[tuple[dict[str, Any], str]], ...]

    def __init__(self, *given: Any) -> None:
        found: dict[int, tuple[str, PrimalKind, torch.Tensor, list[tuple[dict[str, Any], str]]]] = {}
        both = {PrimalKind.PARAMETER: "_parameters", PrimalKind.BUFFER: "_buffers"}
        self._holdings = Holdings(*given)
        roots = self._holdings.modules
        for (kind, attribute), (number, root) in itertools.product(both.items(), enumerate(roots)):
            for path, child in root.named_modules(prefix=f"module {number}" if number else ""):
                holder: dict[str, Any] = getattr(child, attribute)
                for key, tensor in holder.items():
                    if tensor is not None:
                        name = f"{path}.{key}" if path else key
                        if is_lazy(tensor):
                            raise CaptureError.because(
                                "lazy-state",
                                f"{name} of {type(root).__name__} is not initialised",
                                "aot.create_state",
                                node=name,
                                way_out="call the module once on real inputs first",
                            )
                        entry = found.setdefault(id(tensor), (name, kind, tensor, []))
                        entry[3].append((holder, key))
        empty: Any = ((), (), (), ())
        self.names, self.kinds, self.tensors, self.places = (
            zip(*found.values(), strict=True) if found else empty
        )
        self.given, self.token = given, object()
        self._modules = tuple(dict.fromkeys(child for root in roots for child in root.modules()))
        self._structure = self._structure_now()
        self._hooks_seen, self._hooked = -1, list[nn.Module]()

    def current(self) -> list[torch.Tensor]:
        """The modules' current tensors."""
        return [places[0][0][places[0][1]] for places in self.places]

    # checks that a capture relies on

    def is_intact(self) -> bool:
        """Whether structure, tied tensors and attributes are unchanged."""
        return (
            self._structure == self._structure_now()
            and all(
                holder.get(key) is places[0][0].get(places[0][1])
                for places in self.places
                if len(places) > 1
                for holder, key in places[1:]
            )
            and self._holdings.are_same()
        )

    def _structure_now(self) -> tuple[Any, ...]:
        return tuple(
            [
                (
                    type(module),
                    *map(id, module._modules.values()),
                    *[key for key, value in module._parameters.items() if value is not None],
                    *[key for key, value in module._buffers.items() if value is not None],
                )
                for module in self._modules
            ]
        )

    def switches(self) -> tuple[bool, ...]:
        """Whether each module is in training mode."""
        return tuple([module.training for module in self._modules])

    def has_hooks(self) -> bool:
        """Whether any of the modules has hooks, or a global module hook is registered."""
        if RemovableHandle.next_id != self._hooks_seen:
            self._hooks_seen = RemovableHandle.next_id
            self._hooked = [m for m in self._modules if _has_hooks(m)]
        return bool(self._modules) and (any(map(_has_hooks, self._hooked)) or bool(hooks_of_all_modules()))

    # capture

    @contextmanager
    def replaced(self, tensors: Sequence[Any]) -> Iterator[None]:
        """Inside, the modules hold `tensors` instead of their own. If a module reassigns one meanwhile, the
        new value stays."""
        before = self.current()
        try:
            self._place(before, tensors)
            yield
        finally:
            self._place(tensors, before)

    def _place(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        for one, tensor, places in zip(old, new, self.places, strict=True):
            for holder, key in places:
                if holder.get(key) is one:
                    holder[key] = tensor


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in HOOKS_OF_A_MODULE)


@dataclass(frozen=True)
class FlatCall:
    """Calls `fn` with flat inputs: the tensors of `state` first, then the arguments.

    Attributes:
        fn: the function or module.
        state: the state of all modules in the call.
        spec: how the arguments are nested.
        shows_arguments: whether the captured call passes some arguments as real tensors (see `shown`).
    """

    fn: Callable[..., Any]
    state: ModuleState
    spec: Any
    shows_arguments: bool = False

    def __call__(self, leaves: Sequence[Any], first: FirstRun | None = None) -> Any:
        """Call `fn` and return its result. If `first` is given, it follows this run.

        Raises:
            Refusal: `fn` changes a container among its arguments.
        """
        count, had_grad = len(self.state.tensors), torch.is_grad_enabled()
        tensors, given = leaves[:count], list(leaves[count : count + self.spec.num_leaves])
        args, kwargs = pytree.tree_unflatten(given, self.spec)

        def is_filled_otherwise() -> bool:
            left = pytree.tree_leaves((args, kwargs))
            return len(left) != len(given) or any(a is not b for a, b in zip(left, given, strict=True))

        result, error = None, None
        with self.state.replaced(tensors):
            try:
                result = self.fn(*args, **kwargs)
            except Exception as raised:
                error = raised
        if first is not None:
            is_undone = is_filled_otherwise() or torch.is_grad_enabled() != had_grad
            if is_undone or may_hide(result):
                first.why_not = "what it has done is undone, or its result may hide a tensor of the trace"
            first.ended(result, error)
        if error is not None:
            raise error
        if is_filled_otherwise():
            raise not_representable("it changes a container that it was given")
        return result

    def unchanged(self, leaves: Sequence[Any], first: FirstRun | None) -> AbstractContextManager[None]:
        """The context in which `fn` is captured: see `tracer_leaks.unchanged` for Python side effects."""
        return unchanged(self.fn, self.state._modules, leaves, first)

    def shown(self, leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
        """By place, the real tensors that `fn` gets instead of traced ones: those of its modules, and
        arguments whose class or attributes it may ask for.

        Args:
            leaves: the real inputs; empty if they are not available.
        """
        real = dict(enumerate(leaves or self.state.current()))
        count = len(self.state.tensors)
        return {
            place: value
            for place, value in real.items()
            if isinstance(value, torch.Tensor)
            and not is_wrapper(value)
            and (place < count or isinstance(value, (nn.Parameter, nn.Buffer)) or vars(value))
        }

    def names(self, leaves: Sequence[Any]) -> list[str]:
        """The name of each flat input: ``layer.weight``, ``args[0]['x']``, or the keyword. Arguments are only
        numbered if the pytree has no paths."""
        count = len(self.state.tensors)
        arguments, others = leaves[count:][: self.spec.num_leaves], leaves[count + self.spec.num_leaves :]
        names = [f"input {i}" for i in range(len(arguments))]
        with suppress(ValueError):
            paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(arguments, self.spec))[0]
            names = [_argument_name(path) for path, _ in paths]
        return [*self.state.names, *names, *("what its modules hold" for _ in others)]

    def kinds(self, leaves: Sequence[Any]) -> list[PrimalKind]:
        """The kind of each flat input: parameter, buffer or argument."""
        return [*self.state.kinds, *[PrimalKind.ARGUMENT] * (len(leaves) - len(self.state.tensors))]


def _argument_name(path: Sequence[Any]) -> str:
    which, *rest = path
    if which.idx == 0:
        return "args" + pytree.keystr(tuple(rest))
    return str(rest[0].key) + pytree.keystr(tuple(rest[1:]))
