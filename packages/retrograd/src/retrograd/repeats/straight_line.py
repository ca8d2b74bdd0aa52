"""Code that calls the parts of a graph one after the other.

In: steps, each a boxed callable with the names of what it takes and gives. Out: one boxed callable. It is
straight-line Python: a value is let go before the call that reads it last, which then has the only reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Boxed = Callable[[list[Any]], Sequence[Any]]


class Name(str):
    """The name of a value."""

    __slots__ = ()


@dataclass(frozen=True)
class Size:
    """A size that is read of an input before the first call: `name` is ``tensor.size(dim)``."""

    name: str
    tensor: str
    dim: int


@dataclass(frozen=True)
class EmittedCall:
    """A call: `run` takes the values called `reads` and gives those called `makes`."""

    run: Boxed
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True)
class Border:
    """What comes in and goes out.

    Attributes:
        inputs: names of what is in the list.
        sizes: read first of all.
        held: values that are always there, by name.
        results: what is given: names, or constants.
    """

    inputs: Sequence[str]
    sizes: Sequence[Size]
    held: Mapping[str, Any]
    results: Sequence[Any]


def straight_line(border: Border, steps: Sequence[EmittedCall]) -> Boxed:
    """A callable of a list, which it empties, that makes `steps` in order and gives a list."""
    last = _last_uses(border, steps)
    known: dict[str, Any] = dict(border.held)
    lines = ["def run(args):"]
    if border.inputs:
        lines.append(f"    {', '.join(border.inputs)}, = args")
    lines.append("    args.clear()")
    lines += [f"    {size.name} = {size.tensor}.size({size.dim})" for size in border.sizes]
    lines += _let_go(last.get(-1, ()))
    for i, step in enumerate(steps):
        known[f"call_{i}"] = step.run
        lines.append(f"    args = [{', '.join(step.reads)}]")
        lines += _let_go(name for name in last.get(i, ()) if name in step.reads)
        made = f"{', '.join(step.makes)}, = " if step.makes else ""
        lines.append(f"    {made}call_{i}(args)")
    given = []
    for i, result in enumerate(border.results):
        if not isinstance(result, Name):
            known[f"constant_{i}"] = result
        given.append(result if isinstance(result, Name) else f"constant_{i}")
    lines.append(f"    return [{', '.join(given)}]")
    exec(compile("\n".join(lines), "<regions of a graph>", "exec"), known)
    run: Boxed = known["run"]
    return run


def _let_go(names: Iterable[str]) -> list[str]:
    listed = ", ".join(names)
    return [f"    del {listed}"] if listed else []


def _last_uses(border: Border, steps: Sequence[EmittedCall]) -> dict[int, list[str]]:
    """By step (-1: before the first) the names that nothing reads after it."""
    last = dict.fromkeys([*border.inputs, *(size.name for size in border.sizes)], -1)
    for i, step in enumerate(steps):
        last.update(dict.fromkeys((*step.reads, *step.makes), i))
    for name in (*border.held, *(result for result in border.results if isinstance(result, Name))):
        last.pop(name, None)
    places: dict[int, list[str]] = {}
    for name, place in last.items():
        places.setdefault(place, []).append(name)
    return places
