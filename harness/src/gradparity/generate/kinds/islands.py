"""Islands: parts of a function under another mode, or run again in the backward.

In: a scope. Out: a with block, a checkpointed nested function, a hook or a graph break in it.
"""

from __future__ import annotations

from gradparity.generate.draft import Scope, is_float
from gradparity.generate.rows import add_from, add_some, tables_of

ON = "with torch.enable_grad():"
GRAD_MODES = (
    "with torch.no_grad():",
    "with torch.no_grad():",
    ON,
    "with torch.set_grad_enabled(False):",
)
AUTOCASTS = (
    'with torch.autocast("cpu", dtype=torch.bfloat16):',
    'with torch.autocast("cpu", enabled=False):',
    'with torch.autocast("cpu", enabled=False):',
    'with torch.amp.autocast("cpu", dtype=torch.float16):',
    'with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):',
)
CHECKPOINTS = (
    "use_reentrant=False",
    "use_reentrant=False",
    "use_reentrant=True",
    "use_reentrant=False, preserve_rng_state=False",
    'use_reentrant=False, determinism_check="none"',
)
HOOKS = (
    "lambda grad: grad * 2",
    "lambda grad: grad.clone()",
    "lambda grad: None",
    "lambda grad: grad.neg()",
    "lambda grad: grad + 1",
)


def no_grad(scope: Scope) -> bool:
    """A block under another grad mode, with views and changes in place, and often one more in it."""
    is_off = not scope.value("torch.is_grad_enabled()")
    inner = scope.block(ON if is_off and scope.chance.flip(0.7) else scope.chance.pick(GRAD_MODES))
    add_some(inner, scope.chance.between(1, 2), ("view", *tables_of(scope)))
    if scope.chance.flip(0.3):
        no_grad(inner)
    return scope.close(inner)


def autocast(scope: Scope) -> bool:
    """A block under autocast, or with autocast switched off."""
    inner = scope.block(scope.chance.pick(AUTOCASTS))
    add_some(inner, scope.chance.between(1, 3), ("linear", "linear", "unary", "norm", "cast"))
    return scope.close(inner)


def checkpointed(scope: Scope) -> bool:
    """A nested function that the backward runs again. A reentrant one does not return a tensor from outside:
    eager makes the checkpoint that tensor's history, and its backward then runs itself without end.
    """
    name = scope.choose(lambda tensor: is_float(tensor) and tensor.requires_grad)
    if name is None:
        return False
    call, inner_name = scope.draft.name("f"), scope.draft.name("t")
    inner = scope.nested({inner_name: scope.env[name]})
    inner.keen = 0.75
    add_some(inner, scope.chance.between(1, 3), ("unary", "relaid", *tables_of(scope)))
    how = scope.chance.pick(CHECKPOINTS)
    outside = [] if "use_reentrant=False" in how else [*scope.env.values()]
    made = [each for each in inner.tensors(is_float) if each not in scope.env]
    results = [each for each in made if not any(inner.env[each] is value for value in outside)]
    if not scope.close_function(inner, f"def {call}({inner_name}):", [inner_name, *results][-1]):
        return False
    out = scope.draft.name("v")
    return scope.add(f"{out} = checkpoint({call}, {name}, {how})")


def hook_inside(scope: Scope) -> bool:
    """A tensor hook that the compiled function itself registers."""
    name = scope.choose(lambda tensor: tensor.requires_grad)
    if name is None:
        return False
    return scope.add(f"{name}.register_hook({scope.chance.pick(HOOKS)})") and add_from(scope, "unary")


def graph_break(scope: Scope) -> bool:
    """A place at which Dynamo leaves the graph."""
    return scope.add("torch._dynamo.graph_break()")
