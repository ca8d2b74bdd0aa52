"""Braids: a value that several results use in turn, so that its gradients come by interleaved ways.

In: a scope. Out: statements; each goes on with one of a few strands and uses the shared value once more.
"""

from __future__ import annotations

from gradparity.generate.draft import Scope, is_float

USES = (
    "{t} * {h}",
    "{t} + {h}.sin()",
    "{t} - {h} * 0.3",
    "{t}.tanh() * {h}.cos()",
    "torch.where({h} > 0, {t}, {h})",
    "{t} / ({h}.abs() + 1)",
    "torch.addcmul({t}, {h}, {h}, value=0.5)",
    "{t} * {h}.view_as({h})",
    "{t} + {h}.flip(0)",
    "{t} + {h}.sum()",
)
BEGINNINGS = ("{h} * 2", "{h}.exp()", "{h}.detach().clone()", "torch.ones_like({h})", "{h}.view({h}.shape)")


def braid(scope: Scope) -> bool:
    """Two or three strands and three to six uses of the shared value, which is computed or an input."""
    chance = scope.chance
    shared = scope.choose(lambda t: is_float(t) and t.ndim > 0 and t.numel() > 0 and t.requires_grad)
    if shared is None:
        return False
    strands: list[str] = []
    for number in range(chance.between(5, 9)):
        begins = number < 2 or (number == 2 and chance.flip(0.4))
        place = len(strands) if begins else chance.between(0, len(strands) - 1)
        row, before = (chance.pick(BEGINNINGS), "") if begins else (chance.pick(USES), strands[place])
        name = scope.draft.name("v")
        if not scope.add(f"{name} = {row.replace('{h}', shared).replace('{t}', before)}"):
            return False
        strands[place : place + 1] = [name]
    return True
