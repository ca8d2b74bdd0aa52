"""Facts about torch's operators that torch does not provide, or gets wrong: lookups in ``operators.toml``.

In: a question (a column of the table) and an operator. Out: the answer, or None if torch's own metadata is
right. The table explains each question. We read it at first use, which takes 2 ms.
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
    """The table's answer for the operator `target`; None without an entry, or if `target` is no operator."""
    is_known = isinstance(target, OpOverload) and target.namespace in _NAMESPACES
    return _row(target).get(question) if is_known else None


@functools.cache
def _row(operator: OpOverload) -> Mapping[str, Any]:
    namespace, name, overload = str(operator).split(".")
    rows = _table()[namespace]
    return {**rows.get(name, {}), **rows.get(f"{name}.{overload}", {})}


@functools.cache
def answers(question: str) -> Mapping[OpOverload, Any]:
    """This torch's functional operators for which the table has an answer, each with the answer."""
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
    """The Python functions, methods and higher-order operators for which the answer is yes, by name; or a
    mapping from names to answers."""
    return _table()["functions"][question]


def is_of_family(family: str, name: str) -> bool:
    """Whether the operator or function `name`, without its overload, belongs to a family."""
    return _pattern(family).search(name) is not None


@functools.cache
def _pattern(family: str) -> re.Pattern[str]:
    return re.compile(_table()["families"][family])
