"""Hooks: of tensors, of accumulation, of nodes outside the compiled function, of several tensors together.

In: a draft and the outputs. Out: lines that register hooks between forward and backward; every call is an
event.
"""

from __future__ import annotations

import torch

from gradparity.generate.around.outputs import Output
from gradparity.generate.draft import Draft

CHANGES = (
    "",
    "",
    "",
    ", lambda grad: grad * 2",
    ", lambda grad: grad.clone()",
    ", lambda grad: grad.contiguous()",
)
"""What a tensor hook does besides recording."""
OF_ROOTS = 0.4
"""The share of hooks that are those of results, if there are any."""
ORDINALS = ("first", "second", "third")
"""What hooks of one tensor are called: their order is as important as that of tensors."""


def hooks(draft: Draft, found: tuple[Output, ...]) -> list[str]:
    """As many hooks as the policy wants, on average."""
    lines = []
    wanted = draft.policy.hooks
    while wanted > 0 and draft.chance.flip(min(wanted, 0.85)):
        lines += _one(draft, [each for each in found if each.is_root and not _crashes(each.value)])
        wanted -= 0.5 if wanted < 1 else 0.6
    return lines


def _one(draft: Draft, roots: list[Output]) -> list[str]:
    leaves = _leaves(draft)
    if not leaves:
        return []
    draft.intends.add("leaf")
    name, leaf = draft.name("hook"), draft.chance.pick(leaves)
    if roots and draft.chance.flip(OF_ROOTS):
        return draft.chance.pick(_of_root(draft, name, draft.chance.pick(roots).name))
    return draft.chance.deal(f"hooks of {draft.policy.name}", _of_leaves(draft, name, leaf, leaves))


def _of_leaves(draft: Draft, name: str, leaf: str, leaves: list[str]) -> list[list[str]]:
    change, mode = draft.chance.pick(CHANGES), draft.chance.pick(("all", "any"))
    several = f"torch.autograd.graph.register_multi_grad_hook(({', '.join(leaves)},), "
    node = f"torch.autograd.graph.get_gradient_edge({leaf}).node"
    in_turn = [f'{leaf}.register_hook(p.hook("{name} {each}"{change}))' for each in ORDINALS]
    return [
        [f'{leaf}.register_hook(p.hook("{name} {leaf}"{change}))'],
        in_turn,
        in_turn[: draft.chance.between(2, len(in_turn))],
        [_accumulated(name, leaf)],
        [_accumulated(name, each) for each in leaves],
        [f'{node}.register_hook(p.hook("{name} {leaf}", kind="accumulate_node"))'],
        [f'{several}p.hook("{name}", kind="multi"), mode="{mode}")'],
    ]


def _of_root(draft: Draft, name: str, root: str) -> list[list[str]]:
    change = draft.chance.pick(CHANGES)
    hooked = [f'{root}.register_hook(p.hook("{name} {root}"{change}))']
    outside = [
        f"{root} = {root} * 1",
        f'{root}.grad_fn.register_prehook(p.hook("{name} {root}", kind="node_pre"))',
        f'{root}.grad_fn.register_hook(p.hook("{name} {root}", kind="node_post"))',
    ]
    kept = [f"{root}.retain_grad()", f'p.leaf("{name} {root}", {root})']
    return [hooked, hooked, outside, kept]


def _accumulated(name: str, leaf: str) -> str:
    return f'{leaf}.register_post_accumulate_grad_hook(p.hook("{name} {leaf}", kind="post_accumulate"))'


def _crashes(tensor: torch.Tensor) -> bool:
    """Eager 2.13 has a segmentation fault in `register_hook` of a view that was changed under no_grad, and
    never calls a hook of one that was made there.
    """
    return tensor._is_view() and (tensor._version > 0 or tensor.grad_fn is None)


def _leaves(draft: Draft) -> list[str]:
    """Leaves that require grad, the parameters of modules included."""
    found = []
    for name, value in draft.env.items():
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad and name in draft.params:
            found.append(name)
        elif isinstance(value, torch.nn.Module) and name in draft.params:
            found += [
                f"{name}.{key}"
                for key, leaf in value.named_parameters()
                if leaf.requires_grad and _plain(key)
            ]
    return found


def _plain(key: str) -> bool:
    return not any(part.isdecimal() for part in key.split("."))
