"""What torch does not tell of its operators, or tells wrong: lookups in ``operators.toml``.

In: a question, which is a column of the table, and an operator. Out: the answer, or None where torch's own
holds. The table says what each question means. It is read when it is first asked, which takes 2 ms.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from retrograd.facts.tables import read_table

_NAMESPACES = ("aten", "prims")
_table = functools.partial(read_table, "operators")


def fact(question: str, target: Any) -> Any:
    """What the table says of the operator `target`; None if it says nothing, or if this is no operator."""
    is_known = isinstance(target, OpOverload) and target.namespace in _NAMESPACES
    return _row(target).get(question) if is_known else None


@functools.cache
def _row(operator: OpOverload) -> Mapping[str, Any]:
    namespace, name, overload = str(operator).split(".")
    rows = _table()[namespace]
    return {**rows.get(name, {}), **rows.get(f"{name}.{overload}", {})}


@functools.cache
def answers(question: str) -> Mapping[OpOverload, Any]:
    """The operators of this torch that return new values, and for which the table answers; each answer."""
    found = dict[OpOverload, Any]()
    for namespace in _NAMESPACES:
        for key, row in _table()[namespace].items():
            name, _, overload = key.partition(".")
            packet = getattr(getattr(torch.ops, namespace), name, None) if question in row else None
            for each in [overload] if packet and overload else packet.overloads() if packet else ():
                operator = getattr(packet, each)
                if not operator._schema.is_mutable:
                    found[operator] = row[question]
    return found


def functions(question: str) -> Any:
    """The names of Python functions, methods and operators of higher order for which the answer to a question
    is yes; or by name, what the answer is."""
    return _table()["functions"][question]


def is_of_family(family: str, name: str) -> bool:
    """Whether an operator or a function of this name, without its overload, belongs to a family."""
    return _pattern(family).search(name) is not None


@functools.cache
def _pattern(family: str) -> re.Pattern[str]:
    return re.compile(_table()["families"][family])
