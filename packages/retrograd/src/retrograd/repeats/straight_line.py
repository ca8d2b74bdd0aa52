"""Code that calls the parts of a graph one after the other.

In: steps, each a boxed callable with the names of what it takes and gives. Out: one boxed callable. It is
straight-line Python: a value is let go before the call that reads it last, which then has the only reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrograd.graph.emit import Emitter, last_uses

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
    emit = Emitter("run(args)")
    for name, value in border.held.items():
        emit.local[name] = emit.refer("held", value)
    kept = {*border.held, *(result for result in border.results if isinstance(result, Name))}
    came = (*border.inputs, *(size.name for size in border.sizes))
    reads = [(-1, came), *((i, (*step.reads, *step.makes)) for i, step in enumerate(steps))]
    last = last_uses((place, [name for name in names if name not in kept]) for place, names in reads)
    if border.inputs:
        emit.unpack(border.inputs, "args")
    emit.line("args.clear()")
    for size in border.sizes:
        emit.line(f"{emit.name(size.name)} = {emit.name(size.tensor)}.size({size.dim})")
    emit.let_go(last.get(-1, ()))
    for i, step in enumerate(steps):
        emit.line(f"args = {emit.listed(step.reads)}")
        emit.let_go(name for name in last.get(i, ()) if name in step.reads)
        emit.unpack(step.makes, f"{emit.refer('call', step.run)}(args)")
    given = [emit.name(one) if isinstance(one, Name) else emit.refer("c", one) for one in border.results]
    emit.line(f"return [{', '.join(given)}]")
    return emit.function()
