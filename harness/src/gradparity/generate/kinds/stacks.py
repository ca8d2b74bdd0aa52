"""Stacks: one layer called many times, so that what is held at once shows in the peak of memory.

In: a scope. Out: a nested function and loops over it; each call may be checkpointed, and a second loop may
walk the same layers from another value.
"""

from __future__ import annotations

from gradparity.generate.draft import Scope, is_float
from gradparity.generate.inputs import add_input
from gradparity.generate.rows import add_some, tables_of

CALLS = ("{f}({t})", "checkpoint({f}, {t}, use_reentrant=False)")
STARTS = ("{t} * 0.5", "{t}.flip(0)", "{t}.tanh()")
WIDER = 4
"""So many times as wide is the inside of a layer that is a perceptron."""


def stack(scope: Scope) -> bool:
    """A residual layer, called four to eight times in a row, and as often again from another start."""
    chance = scope.chance
    name = scope.choose(lambda t: is_float(t) and t.ndim > 0 and t.numel() > 0 and t.requires_grad)
    if name is None:
        return False
    layer = _layer(scope, name)
    if layer is None:
        return False
    count, call = chance.between(4, 8), chance.pick(CALLS)
    ends: list[str] = []
    for start in ("{t} * 1", *([chance.pick(STARTS)] if chance.flip(0.6) else [])):
        end = scope.draft.name("v")
        called = call.format(f=layer, t=end)
        if scope.add(f"{end} = {start.format(t=name)}\nfor _ in range({count}):\n    {end} = {called}"):
            ends.append(end)
    return not ends or scope.add(f"{scope.draft.name('v')} = {' + '.join(ends)}")


def _layer(scope: Scope, name: str) -> str | None:
    """Defines a function from a tensor like this one to another: a perceptron, or drawn statements."""
    layer, value = scope.draft.name("f"), scope.draft.name("t")
    inner = scope.nested({value: scope.env[name]})
    inner.keen = 0.9
    if scope.chance.flip(0.5):
        width = scope.env[name].shape[-1]
        wide, narrow = (
            add_input(scope.draft, sizes, grad=True)
            for sizes in ((WIDER * width, width), (width, WIDER * width))
        )
        inner.add(f"{scope.draft.name('v')} = F.linear(F.gelu(F.linear({value}, {wide})), {narrow})")
    else:
        add_some(inner, scope.chance.between(3, 6), tables_of(scope))
    fits = [each for each in inner.tensors(is_float) if inner.env[each].shape == scope.env[name].shape]
    last = next((each for each in reversed(fits) if each not in scope.env), value)
    done = scope.close_function(inner, f"def {layer}({value}):", f"{value} + torch.tanh({last})")
    return layer if done else None
