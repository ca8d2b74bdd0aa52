"""Stacks: one layer called many times, so that what is held at once shows in the peak of memory.

In: a scope. Out: a nested function and loops over it; each call may be checkpointed, and a second loop may
walk the same layers from another value.
"""

from __future__ import annotations

from gradparity.generate.draft import Scope, is_float
from gradparity.generate.rows import add_some, tables_of

CALLS = ("{f}({t})", "checkpoint({f}, {t}, use_reentrant=False)")
STARTS = ("{t} * 0.5", "{t}.flip(0)", "{t}.tanh()")


def stack(scope: Scope) -> bool:
    """A residual layer, called four to eight times in a row, and as often again from another start."""
    chance = scope.chance
    name = scope.choose(lambda t: is_float(t) and t.ndim > 0 and t.numel() > 0 and t.requires_grad)
    if name is None:
        return False
    layer, value = scope.draft.name("f"), scope.draft.name("t")
    inner = scope.nested({value: scope.env[name]})
    inner.keen = 0.9
    add_some(inner, chance.between(3, 6), tables_of(scope))
    shape = scope.env[name].shape
    fits = [each for each in inner.tensors(is_float) if inner.env[each].shape == shape]
    last = next((each for each in reversed(fits) if each not in scope.env), value)
    if not scope.close_function(inner, f"def {layer}({value}):", f"{value} + torch.tanh({last})"):
        return False
    count, call = chance.between(4, 8), chance.pick(CALLS)
    ends = [name]
    for start in ("{t} * 1", *([chance.pick(STARTS)] if chance.flip(0.6) else [])):
        end = scope.draft.name("v")
        called = call.format(f=layer, t=end)
        if scope.add(f"{end} = {start.format(t=name)}\nfor _ in range({count}):\n    {end} = {called}"):
            ends.append(end)
    return len(ends) == 1 or scope.add(f"{scope.draft.name('v')} = {' + '.join(ends[1:])}")
