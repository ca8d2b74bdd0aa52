"""The kinds of user code that hang from an autograd graph, as one enumeration."""

from __future__ import annotations

import enum


class HookKind(enum.Enum):
    """Where a hook hangs. The value is the name under which torch's documentation knows it."""

    TENSOR_PRE = "tensor hook"
    RETAIN_GRAD = "retain_grad or C++ tensor hook"
    NODE_PRE = "node pre hook"
    NODE_POST = "node post hook"
    POST_ACCUMULATE = "post-accumulate-grad hook"
    UNPACK = "saved-tensor unpack hook"


class CallKind(enum.Enum):
    """What one call of a `BackwardGraph` is. Only functional kinds may be part of a segment."""

    NODE = "built-in autograd node"
    VALIDATE = "check of a node's outputs against the metadata of their consumers"
    COPY_SLICES = "part of an in-place operation on a view"
    SUM = "sum of the gradients that meet in one buffer"
    PROJECT = "one element of a call's result"
    HOOK = "hook"
    FUNCTION = "autograd.Function backward"
    CPP_FUNCTION = "C++ autograd function"
    ATEN = "operation of a backward that AOTAutograd traced"
    AOT_SAVED = "saved tensors on the context of a function that AOTAutograd compiled"
    ACCUMULATE = "accumulation into .grad"

    # Every pass asks each call for its kind: this hash is computed in C, that of `Enum` in Python.
    __hash__ = object.__hash__

    @property
    def is_functional(self) -> bool:
        """Whether the call reads and writes nothing but its arguments and results."""
        return self in _FUNCTIONAL

    @property
    def is_node(self) -> bool:
        """Whether the call stands for an autograd node (an inlined node is many calls of `ATEN`)."""
        return self in _NODES


_FUNCTIONAL = frozenset(
    {
        CallKind.NODE,
        CallKind.ATEN,
        CallKind.VALIDATE,
        CallKind.COPY_SLICES,
        CallKind.SUM,
        CallKind.PROJECT,
    }
)

_NODES = frozenset(
    {
        CallKind.NODE,
        CallKind.CPP_FUNCTION,
        CallKind.FUNCTION,
        CallKind.COPY_SLICES,
        CallKind.ACCUMULATE,
    }
)
