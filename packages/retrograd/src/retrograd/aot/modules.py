"""A function of modules and pytrees as a function of flat inputs.

In: a function, modules, and how the arguments are nested. Out: `FlatCall`, with a name and a kind for each
flat input; and `ModuleState`, which has the modules' tensors (a tied one once), calls with others in their
place, and says whether what a capture relies on is as it was: structure, ``training`` flags, hooks, and which
attributes there are: plain values, other objects, and what is in lists, dictionaries and sets of a few.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from retrograd._torch import pytree
from retrograd._torch.subclass import is_wrapper
from retrograd._torch.trace import FirstRun
from retrograd.aot.escapes import MOST_ITEMS, OF_ALL_MODULES, no_tensor_escapes
from retrograd.errors import CaptureError, Refusal, not_representable
from retrograd.graph.joint import PrimalKind
from retrograd.graph.structure import is_same

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def are_all_modules_hooked() -> bool:
    """Whether there are hooks of all modules of the process."""
    return any(getattr(torch_module, name) for name in _GLOBAL_HOOKS)


@dataclass
class ModuleState:
    """The tensors and settings of some modules.

    Attributes:
        roots: the modules, as they were given.
        names, kinds, tensors: of each tensor, parameters first.
        places: for each tensor, the dictionaries that hold it, with its name there.
        renewals: how often the state of these modules was read before, because it had changed.
    """

    roots: tuple[nn.Module, ...] = ()
    names: tuple[str, ...] = ()
    kinds: tuple[PrimalKind, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    places: tuple[tuple[tuple[dict[str, Any], str], ...], ...] = ()
    _modules: tuple[nn.Module, ...] = ()
    _structure: tuple[Any, ...] = ()
    _attributes: tuple[tuple[dict[str, Any], str, Any], ...] = ()
    _hooks_seen: int = -1
    _has_hooks: bool = False
    renewals: int = 0

    @staticmethod
    def of(*roots: nn.Module) -> ModuleState:
        """The state of `roots`.

        Raises:
            CaptureError: a parameter or buffer that is not initialised yet.
        """
        found: dict[int, tuple[str, PrimalKind, torch.Tensor, list[tuple[dict[str, Any], str]]]] = {}
        for kind, (number, root) in itertools.product(
            (PrimalKind.PARAMETER, PrimalKind.BUFFER), enumerate(roots)
        ):
            prefix = "" if number == 0 else f"module {number}."
            for path, child in root.named_modules():
                holder: dict[str, Any] = child._parameters if kind is PrimalKind.PARAMETER else child._buffers
                for key, tensor in holder.items():
                    if tensor is not None:
                        name = prefix + (f"{path}.{key}" if path else key)
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
        names, kinds, tensors, places = zip(*found.values(), strict=True) if found else ((), (), (), ())
        modules = tuple(dict.fromkeys(child for root in roots for child in root.modules()))
        held = tuple(
            (vars(child), key, _copied(value))
            for child in modules
            for key, value in vars(child).items()
            if key not in OF_ALL_MODULES
        )
        state = ModuleState(roots, names, kinds, tensors, tuple(map(tuple, places)), modules, (), held)
        state._structure = state._structure_now()
        return state

    def current(self) -> list[torch.Tensor]:
        """The tensors that are in these places now."""
        return [places[0][0][places[0][1]] for places in self.places]

    # what a capture relies on

    def is_intact(self) -> bool:
        """Whether structure, tied tensors and attributes are what they were."""
        return (
            self._structure == self._structure_now()
            and all(
                holder.get(key) is places[0][0].get(places[0][1])
                for places in self.places
                if len(places) > 1
                for holder, key in places[1:]
            )
            and all(is_same(holder.get(key), value) for holder, key, value in self._attributes)
        )

    def _structure_now(self) -> tuple[Any, ...]:
        return tuple(
            [
                (
                    *map(id, module._modules.values()),
                    len(module._parameters),
                    len(module._buffers),
                    len(vars(module)),
                )
                for module in self._modules
            ]
        )

    def switches(self) -> tuple[bool, ...]:
        """Whether each module is in training mode."""
        return tuple([module.training for module in self._modules])

    def has_hooks(self) -> bool:
        """Whether any of the modules, or all modules of the process, have hooks."""
        if not self._modules:
            return False
        if self._has_hooks or RemovableHandle.next_id != self._hooks_seen:
            self._hooks_seen = RemovableHandle.next_id
            own = any(getattr(m, name) for m in self._modules for name in _HOOKS)
            self._has_hooks = own or are_all_modules_hooked()
        return self._has_hooks

    # capture

    @contextmanager
    def unchanged(self, leaves: Sequence[Any], first: FirstRun) -> Iterator[None]:
        """Inside, the function is captured, by its one run `first`. Attributes that it has set or filled, of
        the modules or of an object among `leaves`, and random numbers, are as before afterwards, unless what
        it did in that run counts.

        Raises:
            CaptureError: it has changed some.
        """
        noted = [(owner, _attributes(owner)) for owner in (*self._modules, *filter(_is_plain_object, leaves))]
        filled = [(key, owner, v, _copied(v)) for owner, held in noted for key, v in held.items()]
        held_by_all = [(key, owner, vars(owner)[key]) for owner in self._modules for key in _HELD]
        filled += [(key, owner, container, container.copy()) for key, owner, container in held_by_all]
        drawn = [(*generator, generator[1]()) for generator in _generators()]
        changed: list[tuple[str, str]] = []
        try:
            yield
        finally:
            now = [_attributes(owner) for owner, _ in noted]
            others = [
                [key for key in {*new, *old} if new.get(key, _ASIDE) is not old.get(key, _ASIDE)]
                for new, (_, old) in zip(now, noted, strict=True)
            ]
            refilled = [one for one in filled if not is_same(one[2], one[3])]
            redrawn = [one for one in drawn if repr(one[1]()) != repr(one[3])]
            changed += [
                (key, type(owner).__name__)
                for (owner, _), keys in zip(noted, others, strict=True)
                for key in keys
            ]
            changed += [(key, type(owner).__name__) for key, owner, *_ in refilled]
            changed += [("the state", name) for name, *_ in redrawn]
            counts = bool(changed) and first.is_finished()
            for (owner, before), new, keys in zip(noted, now, others, strict=True):
                for key in keys:
                    if counts and key in new:
                        vars(owner)[key] = first.real(new[key])
                    elif not counts and key in before:
                        vars(owner)[key] = before[key]
                    elif not counts:
                        del vars(owner)[key]
            for _, _, container, before in refilled:
                after = copy.copy(first.real(container) if counts else before)  # a set is not made anew
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(after)
            for _, _, restore, before in redrawn:
                if not counts:
                    restore(before)
        if changed:
            raise CaptureError.because(
                "side-effect",
                "the function sets {} of {}, which would happen at capture only".format(*min(changed)),
                "aot.function",
                way_out='torch.compile(backend="retrograd"), which sees it',
            )

    @contextmanager
    def replaced(self, tensors: Sequence[Any]) -> Iterator[None]:
        """The modules with `tensors` in place of their own."""
        before = self.current()
        try:
            self._place(tensors)
            yield
            if (name := self.assigned_anew(tensors)) is not None:
                raise Refusal("state-replaced", f"{name} is assigned anew by the module")
        finally:
            self._place(before)

    def assigned_anew(self, tensors: Sequence[Any]) -> str | None:
        """The name of one of `tensors` that is no longer where it was placed; None if all are."""
        for name, tensor, places in zip(self.names, tensors, self.places, strict=True):
            if any(holder.get(key) is not tensor for holder, key in places):
                return name
        return None

    def _place(self, tensors: Sequence[Any]) -> None:
        for tensor, places in zip(tensors, self.places, strict=True):
            for holder, key in places:
                holder[key] = tensor


_ASIDE = object()


#: of what every module has: tensors, modules, and the names of buffers that no state dictionary has.
_HELD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _copied(value: Any) -> Any:
    """A list, dictionary or set again; other values as they are. Longer ones are constants, like objects."""
    is_short = type(value) in (list, dict, set) and len(value) <= MOST_ITEMS
    return type(value)(value) if is_short else value


def _generators() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Python's random numbers and, if it is imported, NumPy's: name, how to get and how to set the state."""
    yield "Python's random numbers", random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "NumPy's random numbers", numpy.random.get_state, numpy.random.set_state


def _is_plain_object(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not isinstance(leaf, (torch.Tensor, nn.Module, type))


def _attributes(owner: Any) -> dict[str, Any]:
    """What a module holds besides tensors, modules and hooks; what an object holds."""
    is_module = isinstance(owner, nn.Module)
    return {k: v for k, v in vars(owner).items() if not is_module or k[:1] != "_" or k[:2] == "__"}


#: besides tensors: what a function may return that refers to nothing else.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *_PLAIN))


def _raise(error: Exception) -> Any:
    raise error


@dataclass(frozen=True)
class FlatCall:
    """Calls `fn` with the state of its module, if it is one, and arguments nested as `spec` says.

    Called with flat inputs: the tensors of `state` first, then the arguments.

    Attributes:
        shows_arguments: whether, of the call that it is captured for, arguments are `shown` as they are.
    """

    fn: Callable[..., Any]
    state: ModuleState
    spec: Any
    shows_arguments: bool = False

    def __call__(self, leaves: Sequence[Any], first: FirstRun | None = None) -> Any:
        """What `fn` returns. If `first` is given, this is the run that it follows.

        Raises:
            Refusal: `fn` changes the containers of its arguments.
            CaptureError: it keeps a tensor.
            Refusal: the module replaces a parameter or buffer.
        """
        count, had_grad = len(self.state.tensors), torch.is_grad_enabled()
        tensors, given = leaves[:count], list(leaves[count:])
        args, kwargs = pytree.tree_unflatten(given, self.spec)

        def is_filled_otherwise() -> bool:
            left = pytree.tree_leaves((args, kwargs))
            return len(left) != len(given) or any(a is not b for a, b in zip(left, given, strict=True))

        def ended(end: Callable[[], Any], result: Any = None) -> None:
            if first is None:
                return
            is_undone = is_filled_otherwise() or self.state.assigned_anew(tensors) is not None
            is_undone |= torch.is_grad_enabled() != had_grad
            if is_undone or not all(map(_is_plain, pytree.tree_leaves(result))):
                first.why_not = "what it has done is undone, or its result may hide a tensor of the trace"
            first.ended(end)

        with self.state.replaced(tensors), no_tensor_escapes(self.fn, self.state.roots, first):
            try:
                result = self.fn(*args, **kwargs)
            except Exception as error:
                ended(functools.partial(_raise, error))
                raise
            ended(lambda: result, result)
        if is_filled_otherwise():
            raise not_representable("it changes a container that it was given")
        return result

    def shown(self, leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
        """By place, the real tensors that `fn` is given as they are: those of its modules, and arguments of
        which it may ask for the class or for attributes.

        Args:
            leaves: the real inputs; none if they are not at hand.
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
        """``layer.weight``, ``args[0]['x']``, or the keyword; numbers where a container has no names for its
        parts."""
        arguments = list(leaves[len(self.state.tensors) :])
        try:
            paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(arguments, self.spec))[0]
        except ValueError:
            return [*self.state.names, *(f"input {i}" for i in range(len(arguments)))]
        return [*self.state.names, *(_argument_name(path) for path, _ in paths)]

    def kinds(self, leaves: Sequence[Any]) -> list[PrimalKind]:
        """What each flat input is to the user."""
        return [*self.state.kinds, *[PrimalKind.ARGUMENT] * (len(leaves) - len(self.state.tensors))]


def _argument_name(path: Sequence[Any]) -> str:
    which, *rest = path
    if which.idx == 0:
        return "args" + pytree.keystr(tuple(rest))
    return str(rest[0].key) + pytree.keystr(tuple(rest[1:]))
