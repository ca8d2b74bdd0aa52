"""Operators and tensors of one's own: custom operators with odd strides or effects, and wrapper subclasses.

In: a scope. Out: a definition and a call, or an input of another class.
"""

from __future__ import annotations

from gradparity.generate.draft import Rejected, Scope, is_float
from gradparity.generate.inputs import shape, written

STRIDES = {
    "contiguous": "x.new_empty(x.shape)",
    "reversed": "x.new_empty(x.shape[::-1]).permute(*range(x.ndim - 1, -1, -1))",
    "padded": "x.new_empty((*x.shape[:-1], x.shape[-1] + 3))[..., : x.shape[-1]]",
    "gapped": "x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2]",
    "like": "torch.empty_like(x)",
}
"""How the result of a custom operator is laid out; its fake says the same."""

BACKWARDS = {
    "g * 2": "g * 2",
    "saved": "g * ctx.saved_tensors[0].cos()",
    "turned": "(g * 2).reshape(-1).flip(0).flip(0).reshape(g.shape)",
    "expanded": "g.sum().expand(g.shape)",
}
CHANGING = """@torch.library.custom_op("gradparity::{name}", mutates_args=("x",))
def {name}(x: torch.Tensor, scale: float) -> None:
    x.mul_(scale)


@{name}.register_fake
def {name}_fake(x, scale):
    return None"""

RETURNING = """@torch.library.custom_op("gradparity::{name}", mutates_args=())
def {name}(x: torch.Tensor, scale: float) -> torch.Tensor:
    out = {made}
    out.copy_(x * scale)
    return out


@{name}.register_fake
def {name}_fake(x, scale):
    return {made}


def {name}_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def {name}_backward(ctx, g):
    return {backward}, None


{name}.register_autograd({name}_backward, setup_context={name}_setup)"""


def custom_operator(scope: Scope) -> bool:
    """A custom operator and its call."""
    name = scope.choose(lambda t: is_float(t) and t.ndim > 0)
    if name is None:
        return False
    operator = scope.draft.name("op")
    if scope.chance.flip(0.2):
        if scope.env[name].requires_grad:
            return False
        scope.draft.define(CHANGING.format(name=operator))
        return scope.add(f"{operator}({name}, 2.0)")
    made, backward = STRIDES[scope.chance.pick(list(STRIDES))], BACKWARDS[scope.chance.pick(list(BACKWARDS))]
    scope.draft.define(RETURNING.format(name=operator, made=made, backward=backward))
    return scope.add(f"{scope.draft.name('v')} = {operator}({name}, {scope.chance.pick(('2.0', '-1.0'))})")


def wrapped_input(scope: Scope) -> bool:
    """An input of a wrapper subclass, and a sum of it with a plain tensor or itself."""
    draft = scope.draft
    if any("TwoTensor" in line for line in draft.inputs):
        return False
    sizes, name = shape(draft, (1, 2)), draft.name("x")
    pair = f"TwoTensor(p.randn({written(sizes)}), p.randn({written(sizes)}))"
    try:
        draft.put(f'{name} = p.leaf("{name}", {pair}.requires_grad_())')
    except Rejected:
        return False
    draft.add_param(name)
    return scope.add(f"{draft.name('v')} = {name} * {scope.chance.pick(('2', name, f'{name}.sin()'))}")
