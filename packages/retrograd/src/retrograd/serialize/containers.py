"""How containers are nested, as plain data, and back.

In: a pytree's spec; in a fixed set of containers. Out: JSON; of that, the spec again. torch's own form names
classes, which its reader imports.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

from retrograd._torch.pytree import TreeSpec, tree_structure, tree_unflatten
from retrograd.errors import Refusal
from retrograd.serialize.values import read_value, serialize_value

#: containers, by their names in files.
_CONTAINERS: dict[str, Any] = {
    cls.__name__: cls for cls in (tuple, list, dict, OrderedDict, defaultdict, deque)
}
#: what makes the missing values of a defaultdict.
_FACTORIES: dict[str, Any] = {
    "None": None,
    **{cls.__name__: cls for cls in (list, dict, set, int, float, str)},
}
_KEYS = (bool, int, float, str, tuple, type(None))


def serialize_spec(spec: TreeSpec) -> Any:
    """How containers are nested: null for a leaf; of a container its kind, what is in it, and its keys, its
    largest length or its factory.

    Raises:
        Refusal: one is of another kind.
    """

    def write(tree: Any) -> Any:
        if tree is _LEAF:
            return None
        name = type(tree).__name__
        if _CONTAINERS.get(name) is not type(tree):
            raise Refusal("unwritable", f"a container of type {name}")
        if isinstance(tree, dict):
            keys = [serialize_value(key) for key in tree]
            factory = str(getattr(getattr(tree, "default_factory", None), "__name__", None))
            if factory not in _FACTORIES or not all(type(key) in _KEYS for key in tree):
                raise Refusal("unwritable", f"a {name} of {factory} with keys {[*tree]}"[:200])
            return [name, [*map(write, tree.values())], [keys, factory]]
        return [name, [*map(write, tree)], getattr(tree, "maxlen", None)]

    return write(tree_unflatten([_LEAF] * spec.num_leaves, spec))


#: stands for a leaf while a tree is written or read; no container.
_LEAF = object()


def read_spec(written: Any) -> TreeSpec:
    """What `serialize_spec` wrote.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that was written so.
    """

    def read(one: Any) -> Any:
        if one is None:
            return _LEAF
        name, parts, more = one
        cls, values = _CONTAINERS[name], [read(part) for part in parts]
        if cls is deque:
            return deque(values, more)
        if not issubclass(cls, dict):
            return cls(values)
        keys = [read_value(key, {}) for key in more[0]]
        if not all(type(key) in _KEYS for key in keys) or len({*keys}) != len(keys):
            raise ValueError(f"the keys {keys!r:.80}")
        items = zip(keys, values, strict=True)
        return defaultdict(_FACTORIES[more[1]], items) if cls is defaultdict else cls(items)

    return tree_structure(read(written))
