"""Nested containers, taken apart and put together: torch's pytrees, which have no public name."""

from __future__ import annotations

from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "TreeSpec",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]
