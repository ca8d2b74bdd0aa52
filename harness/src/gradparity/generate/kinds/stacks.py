"""Stacks: one layer called many times, so that what is held at once shows in the peak of memory.

In: a scope. Out: a nested function and loops over it; each call may be checkpointed, and further loops may
walk the same layers from other values.
"""

from __future__ import annotations

from gradparity.generate.draft import Scope, is_float
from gradparity.generate.inputs import add_input
from gradparity.generate.rows import add_some, tables_of

CALLS = ("{f}({t})", "checkpoint({f}, {t}, use_reentrant=False)")
STARTS = ("{t} * 1", "{t} * 0.5", "{t}.flip(0)", "{t}.tanh()")
MOST = 12
"""So many calls at most: a compiler unrolls them."""
WIDER = 4
"""So many times as wide is the inside of a layer that is a perceptron."""


def stack(scope: Scope) -> bool:
    """A residual layer, called some times in a row, and as often again from up to three other starts."""
    chance = scope.chance
    name = scope.choose(lambda t: is_float(t) and t.ndim > 0 and t.numel() > 0 and t.requires_grad)
    if name is None:
        return False
    layer = _layer(scope, name)
    if layer is None:
        return False
    starts, call = chance.some(STARTS), chance.pick(CALLS)
    count = chance.between(2, max(MOST // len(starts), 2))
    ends: list[str] = []
    for start in starts:
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
