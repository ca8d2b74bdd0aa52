"""Inputs: tensors that are made before the compiled function is called.

In: a draft, a shape, a kind of numbers. Out: a line such as
`x0 = p.leaf("x0", p.randn(6, 4).permute(1, 0).requires_grad_())` in the draft, and the name of a parameter of
the compiled function.
"""

from __future__ import annotations

from collections.abc import Callable

from gradparity.generate.draft import Draft

Shape = tuple[int, ...]
PART = 4
"""A shape has at most this part of the elements that a value may have."""
NUMBERS = {
    "drawn": "{}",
    "ties": "{}.round()",
    "positive": "{}.abs()",
    "large": "({} * 300)",
    "infinite": "(1 / {}.round())",
    "nan": "{}.round().log()",
}
"""What may stand in an input: numbers of which many are equal are also zeros of both signs."""


def size(draft: Draft) -> int:
    """The size of one dimension."""
    return draft.chance.weighted(draft.policy.sizes)


def shape(draft: Draft, ranks: tuple[int, ...] = ()) -> Shape:
    """A shape of one of these ranks, or of any; small enough to compute with."""
    rank = draft.chance.pick(ranks) if ranks else draft.chance.weighted(draft.policy.ranks)
    made: list[int] = []
    room = draft.policy.longest // PART
    for _ in range(rank):
        made.append(min(size(draft), max(room, 1)))
        room //= max(made[-1], 1)
    return tuple(made)


def add_input(draft: Draft, sizes: Shape, kind: str = "float", grad: bool | None = None) -> str:
    """Adds an input of this shape. `kind`: float, positive, int, bool or complex; `grad`: whether it requires
    grad (None: as it falls).
    """
    chance = draft.chance
    differentiable = kind in ("float", "positive", "complex")
    grad = differentiable and draft.with_grad and (chance.flip(0.8) if grad is None else grad)
    name = draft.name("x")
    made = _numbers(draft, sizes, kind)
    if not grad:
        draft.put(f'{name} = p.watch("{name}", {made})')
        draft.add_param(name)
        return name
    draft.put(f'{name} = p.leaf("{name}", {made}.requires_grad_())')
    if not chance.flip(draft.policy.changed):
        draft.add_param(name)
        return name
    inner = draft.name("h")
    draft.put(f'{inner} = p.watch("{inner}", {name} * {chance.pick(("1", "0.5", "2"))})')
    draft.add_param(inner)
    return inner


def add_alias(draft: Draft) -> str | None:
    """Adds a parameter that shares memory with an earlier one, or is the same tensor."""
    names = [name for name in draft.params if not draft.env[name].requires_grad or draft.env[name].ndim]
    if not names:
        return None
    source = draft.chance.pick(names)
    name = draft.name("a")
    draft.put(f"{name} = {draft.chance.pick(aliases_of(source, tuple(draft.env[source].shape)))}")
    draft.add_param(name)
    return name


def aliases_of(name: str, sizes: Shape) -> list[str]:
    """Expressions that share memory with a tensor of this shape."""
    found = [name, f"{name}.detach()"]
    if sizes:
        found += [f"{name}[1:]", f"{name}[:1]", f"{name}[::2]", f"{name}[0]"] if sizes[0] > 1 else []
        found += [f"{name}.unsqueeze(0)", f"{name}.view_as({name})"]
    if len(sizes) > 1:
        found += [f"{name}.transpose(0, 1)", f"{name}[:, :1]", f"{name}.mT"]
    return found


def laid_out(draft: Draft, sizes: Shape, layout: str, base: Callable[[Shape], str]) -> str:
    """The text of a tensor of this shape in this layout; `base` writes one that is contiguous."""
    if layout == "turned" and len(sizes) > 1:
        order = draft.chance.shuffled(range(len(sizes)))
        back = tuple(order.index(place) for place in range(len(sizes)))
        return f"{base(tuple(sizes[place] for place in order))}.permute{back}"
    if layout == "gapped" and sizes:
        return f"{base((*sizes[:-1], 2 * sizes[-1]))}[..., ::2]"
    if layout == "offset" and sizes:
        return f"{base((sizes[0] + 1, *sizes[1:]))}[1:]"
    if layout == "inner":
        return f"{base((2, *sizes))}[1]"
    if layout == "expanded" and sizes:
        kept = [1 if draft.chance.flip(0.5) else each for each in sizes]
        return f"{base(tuple(kept))}.expand{_tuple(sizes)}"
    if layout == "channels_last" and len(sizes) == 4:
        return f"{base(sizes)}.contiguous(memory_format=torch.channels_last)"
    return base(sizes)


def written(sizes: Shape) -> str:
    """ "2, 3", as arguments of a call."""
    return ", ".join(map(str, sizes))


def _tuple(sizes: Shape) -> str:
    return f"({written(sizes)})"


def _numbers(draft: Draft, sizes: Shape, kind: str) -> str:
    chance, policy = draft.chance, draft.policy
    layout = chance.weighted(policy.layouts)
    if kind == "int":
        return laid_out(draft, sizes, layout, lambda s: f"p.randint({', '.join(map(str, (9, *s)))})")
    if kind == "bool":
        return laid_out(draft, sizes, layout, lambda s: f"(p.rand({written(s)}) > 0.4)")
    dtype = chance.weighted(policy.dtypes)
    if kind == "complex":
        pair = "torch.complex(p.randn({0}), p.randn({0}))"
        return laid_out(draft, sizes, layout, lambda s: pair.format(written(s)))
    named = "" if dtype == "float32" else f'dtype="{dtype}"'
    maker = "p.rand" if kind == "positive" else "p.randn"
    form = "({} + 0.5)" if kind == "positive" else NUMBERS[chance.weighted(policy.numbers)]

    def base(shape: Shape) -> str:
        return form.format(f"{maker}({', '.join(filter(None, (written(shape), named)))})")

    return laid_out(draft, sizes, layout, base)
