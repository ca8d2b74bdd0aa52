"""Holes: how a row of a table becomes a statement.

In: a template such as `{out} = torch.cumsum({x:1d+}, {dim})` and a scope. Out: the text with every hole
filled by operands and numbers that fit, or None. A hole is a name, and after a colon what is wanted of it:

    {x} {x:2d} {x:2d+ grad}     an operand: a tensor seen in the scope, or a new input
    {x:int} {x:2d square}       of another kind, or of a certain form; {x:2d filled} is not empty
    {y:as x}                    an operand of x's shape
    {y:onto x}                  an operand that broadcasts to x's shape
    {y:shape (x.shape[-1], 4)}  an operand of this shape, computed from the operands before it
    {out} {out2}                a new name
    {dim} {s} {k} {index} …     numbers that fit the operand x; see `numbers.py`

A hole that stands twice is filled alike.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from gradparity.generate.draft import Draft, Scope, is_float
from gradparity.generate.inputs import add_input, shape, size
from gradparity.generate.numbers import NUMBERS

HOLE = re.compile(r"\{(\w+?)(?::([^{}]*))?\}")
OPERANDS = ("x", "y", "z", "w", "q")
KINDS = ("float", "int", "bool", "complex", "positive", "any")
MOST_INPUTS = 6


def fill(scope: Scope, template: str) -> str | None:
    """The template with all holes filled; None if an operand cannot be had."""
    wishes: dict[str, str] = {}
    for match in HOLE.finditer(template):
        wishes[match[1]] = wishes.get(match[1]) or match[2] or ""
    texts: dict[str, str] = {}
    bound: dict[str, Any] = {}
    for name in [each for each in OPERANDS if each in wishes]:
        found = _operand(scope, wishes[name], bound)
        if found is None:
            return None
        try:
            texts[name], bound[name] = found, eval(found, scope.env)
        except RuntimeError:
            return None  # a view made under no_grad of what was changed since: nothing may read it
    for name in [each for each in wishes if each not in texts]:
        try:
            texts[name] = _number(scope, name, bound, texts)
        except (IndexError, ValueError, ZeroDivisionError):
            return None  # this operand has no such number
    return HOLE.sub(lambda match: texts[match[1]], template)


def _number(scope: Scope, name: str, bound: dict[str, Any], texts: dict[str, str]) -> str:
    if name.startswith("out"):
        return scope.draft.name("v")
    return NUMBERS[name.rstrip("0123456789")](scope, bound, texts)


def _operand(scope: Scope, wish: str, bound: dict[str, torch.Tensor]) -> str | None:
    words = wish.split(maxsplit=1)
    if words and words[0] == "as":
        return _shaped(scope, tuple(bound[words[1]].shape), bound[words[1]])
    if words and words[0] == "onto":
        return _broadcast(scope, bound[words[1]])
    if words and words[0] == "shape":
        sizes = eval(words[1], {"n": size(scope.draft)}, bound)
        return _shaped(scope, sizes, bound.get("x"))
    return _any(scope, wish.split())


def _any(scope: Scope, words: list[str]) -> str | None:
    kind = next((word for word in words if word in KINDS), "float")
    ranks = next((_ranks(word) for word in words if word[0].isdigit()), tuple(range(5)))
    grad = True if "grad" in words else False if "nograd" in words else None

    def fits(tensor: torch.Tensor) -> bool:
        return (
            _is_kind(tensor, kind)
            and tensor.ndim in ranks
            and (grad is None or tensor.requires_grad is grad)
            and ("filled" not in words or tensor.numel() > 0)
            and ("square" not in words or tensor.shape[-1] == tensor.shape[-2])
            and ("leafless" not in words or not (tensor.is_leaf and tensor.requires_grad))
        )

    found = scope.choose(fits) if kind != "positive" else None
    if found is not None or not _may_add(scope.draft):
        return found
    sizes = shape(scope.draft, ranks if len(ranks) < 5 else ())
    if "filled" in words:
        sizes = tuple(max(each, 1) for each in sizes)
    if "square" in words and len(sizes) > 1:
        sizes = (*sizes[:-1], sizes[-2])
    return add_input(scope.draft, sizes, "float" if kind == "any" else kind, grad)


def _shaped(scope: Scope, sizes: tuple[int, ...], like: torch.Tensor | None) -> str | None:
    """A tensor of exactly this shape: one that is there, one made from x, or a new input."""
    dtype = torch.float32 if like is None else like.dtype
    others = scope.tensors(lambda t: tuple(t.shape) == sizes and t.dtype == dtype and t is not like)
    if others and scope.chance.flip(0.7):
        return scope.chance.pick(others)
    if _may_add(scope.draft) and dtype is torch.float32 and scope.chance.flip(0.6):
        return add_input(scope.draft, sizes)
    made = scope.choose(lambda t: tuple(t.shape) == sizes and t.dtype == dtype)
    if made is not None:
        return scope.chance.pick((f"({made} * 0.5)", f"{made}.detach()", f"{made}.flip(-1)", made))
    if _may_add(scope.draft) and dtype is torch.float32:
        return add_input(scope.draft, sizes)
    return scope.chance.pick((f"torch.ones({sizes}", f"torch.full({sizes}, 0.5")) + f", dtype={dtype})"


def _broadcast(scope: Scope, like: torch.Tensor) -> str | None:
    def fits(tensor: torch.Tensor) -> bool:
        if tensor is like or tensor.dtype != like.dtype or tensor.ndim > like.ndim:
            return False
        pairs = zip(reversed(tensor.shape), reversed(like.shape), strict=False)
        return all(mine in (1, theirs) for mine, theirs in pairs)

    found = scope.choose(fits)
    if found is not None and scope.chance.flip(0.7):
        return found
    cut = scope.chance.between(0, like.ndim) if scope.chance.flip(0.5) else 0
    sizes = tuple(1 if scope.chance.flip(0.3) else each for each in like.shape[cut:])
    return _shaped(scope, sizes, like)


def _is_kind(tensor: torch.Tensor, kind: str) -> bool:
    if kind == "int":
        return tensor.dtype is torch.int64
    if kind == "bool":
        return tensor.dtype is torch.bool
    return kind == "any" or (tensor.is_complex() if kind == "complex" else is_float(tensor))


def _ranks(word: str) -> tuple[int, ...]:
    rank = int(word[0])
    return tuple(range(rank, 5)) if word.endswith("+") else (rank,)


def _may_add(draft: Draft) -> bool:
    return len(draft.params) < MOST_INPUTS
