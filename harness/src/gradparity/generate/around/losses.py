"""Losses: how the run uses the outputs, and with which cotangents.

In: a draft and the outputs that require grad. Out: lines for the run. Cotangents are made before the forward,
in every layout: expanded ones as `.sum()` hands them over, transposed, gapped, zero, conjugated or negated
by a bit only.
"""

from __future__ import annotations

from collections.abc import Callable
from textwrap import indent

import torch

from gradparity.generate.around.outputs import Output
from gradparity.generate.draft import Draft
from gradparity.generate.inputs import Shape, laid_out, written

Roots = list[Output]


def losses(draft: Draft, roots: Roots) -> list[str]:
    """The backward part of the run; nothing if no output requires grad."""
    if not roots:
        return []
    return LOSSES[draft.chance.weighted(draft.policy.losses)](draft, roots)


def cotangent(draft: Draft, root: Output) -> str:
    """Makes a cotangent before the forward, and gives its text, in the root's dtype."""
    layout = draft.chance.weighted(draft.policy.cotangents)
    kind = "torch.zeros" if layout == "zero" else "p.randn"
    if layout == "lazy":
        drawn = f"p.randn({written(root.shape)})"
        text = f"torch.complex({drawn}, {drawn}).conj()" + ("" if root.value.is_complex() else ".imag")
    elif root.value.is_complex():
        text = laid_out(
            draft, root.shape, layout, lambda s: "torch.complex({0}, {0})".format(f"p.randn({written(s)})")
        )
    else:
        text = laid_out(draft, root.shape, layout, lambda s: f"{kind}({_sizes(kind, s)})")
    name = draft.name("c")
    draft.put(f"{name} = {text}")
    return f"{name}.to({root.name}.dtype)"


def _given(draft: Draft, root: Output) -> str:
    """A cotangent as an engine may be given it: None for a number, or in another dtype than the root's."""
    if not root.shape and not root.value.is_complex() and draft.chance.flip(0.4):
        return "None"
    made = cotangent(draft, root)
    return made.partition(".to(")[0] if draft.chance.flip(0.15) else made


def _sizes(maker: str, sizes: Shape) -> str:
    return written(sizes) if maker.startswith("p.") else str(sizes)


def _sum_of(draft: Draft, roots: Roots) -> str:
    """One number that depends on all roots, and now and then on what went into the function too."""
    parts = [_number(draft, root) for root in roots]
    used = [name for name in draft.params if _is_real_root(draft.env[name])]
    if used and draft.chance.flip(0.15):
        before = draft.name("b")
        draft.put(f"{before} = {draft.chance.pick(used)}.cos()")
        parts += draft.chance.some([f"{before}.sum()", f"{draft.chance.pick(used)}.sin().sum()"])
    return f"({' + '.join(parts)})" if len(parts) > 1 else parts[0]


def _is_real_root(value: object) -> bool:
    return type(value) is torch.Tensor and value.requires_grad and value.is_floating_point()


def _leaves(draft: Draft) -> list[str]:
    return [name for name in draft.params if getattr(draft.env[name], "requires_grad", False)]


def _number(draft: Draft, root: Output) -> str:
    if root.value.is_complex():
        return draft.chance.pick(
            (f"{root.name}.abs().sum()", f"{root.name}.real.sum()", f"torch.view_as_real({root.name}).sum()")
        )
    forms = [f"{root.name}.sum()", f"{root.name}.sum()", f"{root.name}.mean()"]
    if len(root.shape) > 1:
        forms += [f"{root.name}.mT.sum()", f"{root.name}.transpose(0, 1).sum()", f"{root.name}[0].sum()"]
    return draft.chance.pick(forms)


def _backward(text: str) -> list[str]:
    return [f"with p.backward():\n    {text}"]


def _sum(draft: Draft, roots: Roots) -> list[str]:
    return _backward(f"{_sum_of(draft, roots)}.backward()")


def _weighted(draft: Draft, roots: Roots) -> list[str]:
    parts = [f"({root.name} * {cotangent(draft, root)}).sum()" for root in roots]
    turned = [
        f"({root.name}.mT * {cotangent(draft, root)}.mT).sum()" for root in roots if len(root.shape) > 1
    ]
    if len(turned) == len(roots) and draft.chance.flip(0.3):
        parts = turned
    real = " + ".join(
        f"{part}.abs()" if root.value.is_complex() else part for part, root in zip(parts, roots, strict=True)
    )
    return _backward(f"({real}).backward()")


def _square(draft: Draft, roots: Roots) -> list[str]:
    return _backward(f"({' + '.join(f'{root.name}.abs().pow(2).sum()' for root in roots)}).backward()")


def _cotangents(draft: Draft, roots: Roots) -> list[str]:
    given = ", ".join(_given(draft, root) for root in roots)
    return _backward(f"torch.autograd.backward([{_names(roots)}], [{given}])")


def _some(draft: Draft, roots: Roots) -> list[str]:
    kept = draft.chance.some(roots)
    return draft.chance.pick((_sum, _cotangents))(draft, kept)


def _grad(draft: Draft, roots: Roots) -> list[str]:
    if not (leaves := _leaves(draft)):
        return _sum(draft, roots)
    draft.intends.add("unused")
    given = ", ".join(_given(draft, root) for root in roots)
    unused = draft.chance.pick(("True", "True", "False"))
    text = f"torch.autograd.grad([{_names(roots)}], [{', '.join(leaves)}], [{given}], allow_unused={unused})"
    return [f'with p.backward():\n    p.value("grads", {text})']


def _each(draft: Draft, roots: Roots) -> list[str]:
    """A backward for each root."""
    if len(roots) < 2:
        return _twice(draft, roots)
    draft.intends.add("freed")
    retain = draft.chance.pick(("retain_graph=True", "", "retain_graph=True"))
    losses = [_number(draft, root) for root in draft.chance.shuffled(roots)[:4]]
    lines = [_backward(f"{loss}.backward({retain})") for loss in losses[:-1]]
    return [*(line for each in lines for line in each), *_backward(f"{losses[-1]}.backward()")]


def _twice(draft: Draft, roots: Roots) -> list[str]:
    draft.intends.add("freed")
    loss = _sum_of(draft, roots)
    retain = draft.chance.pick(("retain_graph=True", "retain_graph=True", ""))
    return _backward(f"{loss}.backward({retain})") + _backward(f"{loss}.backward()")


def _double(draft: Draft, roots: Roots) -> list[str]:
    """A derivative of the first leaf's gradient, or a loss with the gradients of all leaves as a penalty."""
    if not (leaves := _leaves(draft)):
        return _sum(draft, roots)
    draft.intends.update(("unused", "double"))
    loss = _sum_of(draft, roots)
    if draft.chance.flip(0.75):
        first = f"torch.autograd.grad({loss}, {leaves[0]}, create_graph=True)[0]"
        return [f"with p.backward():\n    slope = {first}\n    slope.abs().pow(2).sum().backward()"]
    slopes = f"torch.autograd.grad(loss, [{', '.join(leaves)}], create_graph=True, allow_unused=True)"
    penalty = "sum(slope.abs().pow(2).sum() for slope in slopes if slope is not None)"
    lines = [f"loss = {loss}", f"slopes = {slopes}", f"(loss + {penalty}).backward()"]
    return [f"with p.backward():\n{indent(chr(10).join(lines), '    ')}"]


def _inputs(draft: Draft, roots: Roots) -> list[str]:
    """Gradients of some leaves only, now and then of an output on the way."""
    if not (leaves := _leaves(draft)):
        return _sum(draft, roots)
    chosen = draft.chance.shuffled(leaves)[: draft.chance.between(1, 2)]
    between = draft.chance.flip(0.2) and len(roots) > 1
    chosen += [roots[0].name] if between else []
    lines = _backward(f"{_sum_of(draft, roots)}.backward(inputs=[{', '.join(chosen)}])")
    return [*lines, f'p.value("grad of {roots[0].name}", {roots[0].name}.grad)'] if between else lines


def _names(roots: Roots) -> str:
    return ", ".join(root.name for root in roots)


LOSSES: dict[str, Callable[[Draft, Roots], list[str]]] = {
    "sum": _sum,
    "weighted": _weighted,
    "square": _square,
    "cotangents": _cotangents,
    "some": _some,
    "grad": _grad,
    "each": _each,
    "twice": _twice,
    "double": _double,
    "inputs": _inputs,
}
