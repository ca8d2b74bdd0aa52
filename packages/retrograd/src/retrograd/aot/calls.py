"""A function of pytrees as a function of flat inputs.

In: a function or module, and how its arguments are nested. Out: `FlatCall`, with a name and a kind for each
flat input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from retrograd._torch import pytree
from retrograd.aot.modules import ModuleState
from retrograd.errors import Refusal
from retrograd.graph.joint import PrimalKind


@dataclass(frozen=True)
class FlatCall:
    """Calls `fn` with the state of its module, if it is one, and arguments nested as `spec` says.

    Called with flat inputs: the tensors of `state` first, then the arguments.
    """

    fn: Callable[..., Any]
    state: ModuleState
    spec: Any

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """What `fn` returns.

        Raises:
            Refusal: `fn` changes the containers of its arguments.
            Refusal: the module replaces a parameter or buffer.
        """
        count = len(self.state.tensors)
        given = list(leaves[count:])
        args, kwargs = pytree.tree_unflatten(given, self.spec)
        with self.state.replaced(leaves[:count]):
            result = self.fn(*args, **kwargs)
        left = pytree.tree_leaves((args, kwargs))
        if len(left) != len(given) or any(a is not b for a, b in zip(left, given, strict=True)):
            raise Refusal("not-representable", "it changes a container that it was given")
        return result

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
