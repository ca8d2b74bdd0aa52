"""Numbers: what the holes of a template that are no tensors are filled with.

In: a scope, the operands so far, the texts so far. Out: text. A number that does not exist for this operand
(a dimension of a scalar) is a ValueError or an IndexError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from gradparity.generate.draft import Scope
from gradparity.generate.inputs import size

Bound = Mapping[str, torch.Tensor]
Texts = Mapping[str, str]
Number = Callable[[Scope, Bound, Texts], str]


def _dim(scope: Scope, bound: Bound, texts: Texts) -> str:
    rank, taken = (
        bound["x"].ndim,
        {int(texts[key]) % bound["x"].ndim for key in ("dim", "dim1") if key in texts},
    )
    free = [place for place in range(-rank, rank) if place % rank not in taken]
    return str(scope.chance.pick(free))


def _dims(scope: Scope, bound: Bound, texts: Texts) -> str:
    return str(tuple(scope.chance.some(range(bound["x"].ndim))))


def _order(scope: Scope, bound: Bound, texts: Texts) -> str:
    return str(tuple(scope.chance.shuffled(range(bound["x"].ndim))))


def _length(bound: Bound, texts: Texts) -> int:
    return bound["x"].shape[int(texts.get("dim", "0"))]


def _index(scope: Scope, bound: Bound, texts: Texts) -> str:
    """A tensor of places along the dimension, some of them twice."""
    length = _length(bound, texts)
    count = scope.chance.pick((2, 3, 1, length, 4))
    places = [scope.chance.between(0, length - 1) for _ in range(count)]
    if scope.chance.flip(0.5):
        places = list(dict.fromkeys(places))
    return f"torch.tensor({places})"


def _place(scope: Scope, bound: Bound, texts: Texts) -> str:
    return str(scope.chance.between(-_length(bound, texts), _length(bound, texts) - 1))


def _start(scope: Scope, bound: Bound, texts: Texts) -> str:
    return str(scope.chance.between(0, max(_length(bound, texts) - 1, 0)))


def _stop(scope: Scope, bound: Bound, texts: Texts) -> str:
    return str(scope.chance.between(int(texts["start"]), _length(bound, texts)))


def _shape(scope: Scope, bound: Bound, texts: Texts) -> str:
    """Another shape with as many elements."""
    count = bound["x"].numel()
    parts = [part for part in (2, 3, 4, 1) if count % part == 0 and count]
    if not parts or scope.chance.flip(0.3):
        return "(-1,)"
    part = scope.chance.pick(parts)
    return str(scope.chance.pick(((part, -1), (-1, part), (1, part, count // part))))


def _many(scope: Scope, bound: Bound, texts: Texts) -> str:
    """The shape, with dimensions of size 1 made longer and one more in front, for expand."""
    longer = [size(scope.draft) if each == 1 else each for each in bound["x"].shape]
    return str(tuple([scope.chance.pick((2, 3, 1)), *longer] if scope.chance.flip(0.5) else longer))


def _slices(scope: Scope, bound: Bound, texts: Texts) -> str:
    """An index made of slices and numbers."""
    forms = (":", "1:", ":-1", "::2", "0", "-1", "None", "...", "1:2", ":0")
    used: list[str] = []
    for _ in range(scope.chance.between(1, max(bound["x"].ndim, 1))):
        form = scope.chance.pick(forms)
        used += [] if form == "..." and "..." in used else [form]
    return ", ".join(used)


def _split(scope: Scope, bound: Bound, texts: Texts) -> str:
    length = _length(bound, texts)
    cut = scope.chance.between(0, length)
    return scope.chance.pick((str(max(1, (length + 1) // 2)), f"[{cut}, {length - cut}]"))


def _strided(scope: Scope, bound: Bound, texts: Texts) -> str:
    """Sizes, strides and offset for as_strided within the storage, gaps and overlaps included."""
    count = bound["x"].untyped_storage().nbytes() // max(bound["x"].element_size(), 1)
    rows, columns = scope.chance.pick((2, 3, 1)), scope.chance.pick((2, 3, 4))
    strides = scope.chance.pick(((columns, 1), (1, rows), (1, 1), (columns + 1, 1), (0, 1), (2, 2)))
    last = (rows - 1) * strides[0] + (columns - 1) * strides[1]
    if last >= count:
        raise ValueError("the storage is too small")
    return f"{(rows, columns)}, {strides}, {scope.chance.between(0, min(count - last - 1, 3))}"


def _unfold(scope: Scope, bound: Bound, texts: Texts) -> str:
    """Size and step for unfold: windows that overlap, touch, or leave gaps."""
    length = _length(bound, texts)
    window = scope.chance.between(1, length)
    return f"{window}, {scope.chance.between(1, max(length, 2))}"


def _cut(scope: Scope, bound: Bound, texts: Texts) -> str:
    """Start and length for narrow."""
    start = scope.chance.between(0, max(_length(bound, texts) - 1, 0))
    return f"{start}, {scope.chance.between(0, _length(bound, texts) - start)}"


def _picked(*items: str) -> Number:
    return lambda scope, bound, texts: scope.chance.pick(items)


NUMBERS: dict[str, Number] = {
    "dim": _dim,
    "dims": _dims,
    "order": _order,
    "index": _index,
    "place": _place,
    "start": _start,
    "stop": _stop,
    "shape": _shape,
    "many": _many,
    "slices": _slices,
    "split": _split,
    "strided": _strided,
    "unfold": _unfold,
    "cut": _cut,
    "n": lambda scope, bound, texts: str(size(scope.draft)),
    "total": lambda scope, bound, texts: str(math.prod(bound["x"].shape)),
    "s": _picked("0.5", "2", "-1.5", "1", "0", "0.1", "-1", "3"),
    "k": _picked("1", "0", "2", "-1"),
    "p": _picked("0.5", "0.1", "0.3", "0.9"),
    "flag": _picked("True", "False"),
    "dtype": _picked("torch.float32", "torch.bfloat16", "torch.float64", "torch.float16"),
    "step": _picked("1", "2", "3"),
    "reduce": _picked('"sum"', '"amax"', '"mean"', '"prod"', '"amin"'),
}
"""By the name of the hole, without digits at its end."""
