"""Outputs: what the compiled function returns, and how the run names it.

In: the scope of the function. Out: the text of the return value, and lines that call the function and unpack
what it gives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from gradparity.generate.draft import Rejected, Scope, is_float
from gradparity.generate.inputs import aliases_of


@dataclass(frozen=True)
class Output:
    """One tensor that the run gets: its name there, and the value that it had in the drawing."""

    name: str
    value: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.value.shape)

    @property
    def is_root(self) -> bool:
        """Whether a backward can start here."""
        return self.value.requires_grad


@dataclass(frozen=True)
class Outputs:
    """The text behind return, the target of the assignment in the run, and the tensors."""

    returned: str
    target: str
    tensors: tuple[Output, ...]


def outputs(scope: Scope) -> Outputs:
    """Chooses what is returned. Raises Rejected if no tensor was made."""
    names = _chosen(scope)
    if not names:
        raise Rejected("nothing to return")
    tensors = tuple(Output(scope.draft.name("y"), scope.value(name)) for name in names)
    target = ", ".join(each.name for each in tensors)
    if len(names) > 1 and scope.draft.chance.flip(scope.draft.policy.outputs.get("nested", 0) / 8):
        rest = ", ".join(names[1:])
        inner = target.split(", ", 1)[1]
        return Outputs(f"{names[0]}, [{rest}]", f"{tensors[0].name}, [{inner}]", tensors)
    return Outputs(", ".join(names), target, tensors)


def _chosen(scope: Scope) -> list[str]:
    draft, chance = scope.draft, scope.chance
    made = [name for name in scope.tensors() if name not in draft.env and not name.startswith("t")]
    roots = [name for name in made if scope.env[name].requires_grad] or made
    first = roots[-1:] or [scope.choose(is_float) or scope.choose() or ""]
    if not first[0]:
        return []
    if chance.flip(0.5):
        first += [name for name in reversed(made) if name not in first and _is_unread(scope, name)][:2]
    how = chance.weighted(draft.policy.outputs)
    if how == "some" and made:
        return list(dict.fromkeys([*first, *chance.some(made)]))[:4]
    if how == "all":
        ends = [name for name in made if _is_unread(scope, name)]
        return list(dict.fromkeys([*first, *ends, *chance.some(roots)]))[: max(6, len(ends) + 1)]
    if how == "views":
        given = scope.tensors() if chance.flip(0.3) else []
        source = chance.pick([name for name in given if name in draft.params] or made or first)
        views = aliases_of(source, tuple(scope.env[source].shape))
        return [*first, *chance.shuffled(views)[: chance.between(1, 3)]]
    if how == "family":
        return _family(scope, made) or first
    if how == "shared":
        return [*first, *_shared(scope)]
    if how == "inputs":
        params = [name for name in draft.params if isinstance(scope.env[name], torch.Tensor)]
        return [*first, *chance.some(params)][:4] if params else first
    if how == "twice":
        return first * 2
    if how == "nested" and made:
        return [*first, *chance.some(made)][:3]
    return first


def _family(scope: Scope, made: list[str]) -> list[str]:
    """Views of one intermediate, and often that intermediate detached, or another result; not the
    intermediate itself.
    """
    chance = scope.chance
    bases = [name for name in made if scope.env[name].requires_grad and scope.env[name].ndim]
    if not bases:
        return []
    base = chance.pick(bases)
    views = [
        each
        for each in aliases_of(base, tuple(scope.env[base].shape))
        if each not in (base, f"{base}.detach()")
    ]
    found = chance.shuffled(views)[: chance.between(1, 3)]
    found += [f"{base}.detach()"] if chance.flip(0.6) else []
    return found + ([chance.pick(made)] if chance.flip(0.3) else [])


def _shared(scope: Scope) -> list[str]:
    """A view of an input that shares its memory with another input."""
    inputs = [
        name for name in scope.draft.params if type(scope.env[name]) in (torch.Tensor, torch.nn.Parameter)
    ]
    memory = [scope.env[name].untyped_storage().data_ptr() for name in inputs]
    twins = [name for name, place in zip(inputs, memory, strict=True) if memory.count(place) > 1]
    if not twins:
        return []
    name = scope.chance.pick(twins)
    return [scope.chance.pick(aliases_of(name, tuple(scope.env[name].shape)))]


def _is_unread(scope: Scope, name: str) -> bool:
    """Whether no later statement reads this value, so that it would be lost."""
    return sum(len(re.findall(rf"\b{name}\b", line)) for line in scope.lines) == 1


def observed(tensors: tuple[Output, ...]) -> list[str]:
    """Lines that show the outputs. What becomes of the inputs is watched anyway."""
    return [f'p.value("{each.name}", {each.name})' for each in tensors]
