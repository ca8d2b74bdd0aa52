"""Flattens and rebuilds nested containers with torch's pytrees, which have no public name.

In: containers that torch knows, and dataclasses, registered with torch or not. Out: their leaves, and a spec
from which the container can be rebuilt.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils._pytree import MappingKey, register_pytree_node
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as _flatten
from torch.utils._pytree import tree_flatten_with_path as _flatten_with_path
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten

IsLeaf = Callable[[Any], bool] | None


@dataclasses.dataclass(frozen=True)
class _Record:
    """Replaces a dataclass during flattening. A spec that contains it rebuilds the dataclass."""

    cls: type
    values: dict[str, Any]


def _made(values: Iterable[Any], context: tuple[Any, tuple[str, ...]]) -> Any:
    cls, names = context
    made = cls.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


register_pytree_node(
    _Record,
    lambda record: (list(record.values.values()), (record.cls, tuple(record.values))),
    _made,
    flatten_with_keys_fn=lambda record: (
        [(MappingKey(name), value) for name, value in record.values.items()],
        (record.cls, tuple(record.values)),
    ),
)


def tree_flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], TreeSpec]:
    """The leaves of `tree`, and the spec of their nesting."""
    leaves, spec = _flatten(tree, is_leaf=is_leaf)
    if any(map(_is_dataclass, leaves)):
        leaves, spec = _flatten(_with_records(tree, is_leaf), is_leaf=is_leaf)
    return leaves, spec


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of `tree`."""
    return tree_flatten(tree)[0]


def is_mutable(spec: TreeSpec) -> bool:
    """Whether `spec` has a container that can be changed: one that is rebuilt is another object."""
    kind = spec.type
    is_fixed = kind is None or kind is namedtuple or issubclass(kind, tuple)
    return not is_fixed or any(map(is_mutable, spec.children()))


def tree_flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """The leaves of `tree`, each with its path."""
    return _flatten_with_path(_with_records(tree, None))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, _Record))


def _with_records(tree: Any, is_leaf: IsLeaf) -> Any:
    """`tree` with a `_Record` in place of each dataclass that torch does not know."""

    def replaced(leaf: Any) -> Any:
        if not _is_dataclass(leaf):
            return leaf
        names = (
            vars(leaf) if hasattr(leaf, "__dict__") else [field.name for field in dataclasses.fields(leaf)]
        )
        return _Record(type(leaf), {n: _with_records(getattr(leaf, n), is_leaf) for n in names})

    return tree_map(replaced, tree, is_leaf=is_leaf)
