"""Choose which values of the forward are saved, and which are computed again in the backward.

In: a joint graph and a policy. Out: the same graph, with ``meta["recompute"]`` (a ``CheckpointPolicy``) on
the nodes that the policy decides about. The partitioner reads it. A call that draws random numbers, or has
another effect, is never made twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.fx import has_effect, is_operator_overload
from retrograd._torch.releases import policy_context
from retrograd.errors import PassError
from retrograd.graph.joint import cotangents_reaching, signature_of

Policy = Callable[[fx.Node], Literal["save", "recompute"] | None]
SelectivePolicy = Callable[..., CheckpointPolicy | bool]

_NAME = "recompute_by_policy"
_WORDS = {"save": CheckpointPolicy.MUST_SAVE, "recompute": CheckpointPolicy.MUST_RECOMPUTE, None: None}
_BOOLEANS = {True: CheckpointPolicy.MUST_SAVE, False: CheckpointPolicy.PREFER_RECOMPUTE}
_KNOWN = frozenset(
    getattr(CheckpointPolicy, f"{how}_{what}") for how in ("MUST", "PREFER") for what in ("SAVE", "RECOMPUTE")
)
#: policies are not asked about these, which share the mark of what they are taken from.
_PARTS = frozenset({operator.getitem, torch.ops.aten.detach.default, torch.ops.aten.alias.default})


def recompute_by_policy(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    policy: Policy | None = None,
    selective: SelectivePolicy | None = None,
) -> fx.GraphModule:
    """Mark the forward nodes of `gm`, in place.

    Args:
        gm: a joint graph with its signature.
        example_inputs: unused.
        policy: is given each call of the forward, and returns "save", "recompute", or None to leave it open.
        selective: a policy as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it,
            called as ``fn(ctx, op, *args, **kwargs)`` with the fake values of the arguments.
            ``PREFER_RECOMPUTE`` means "save" for what has an effect, where torch would replay the generator.

    Raises:
        PassError: not exactly one policy is given; it returns something unknown; or it wants to make a call
            with an effect again.
    """
    if (policy is None) == (selective is None):
        _refuse("bad-policy", "it takes either `policy` or `selective`", "give one of the two")
    reaching = cotangents_reaching(gm.graph, signature_of(gm, _NAME))
    for node in gm.graph.nodes:
        if node.op != "call_function" or reaching[node]:
            continue
        if _is_part(node):
            mark = node.args[0].meta.get("recompute")
        else:
            mark = _asked(node, policy) if policy is not None else _asked_selective(node, selective)
        if mark is not None:
            node.meta["recompute"] = _allowed(node, mark)
    return gm


def _is_part(node: fx.Node) -> bool:
    """Whether the node is one of the values of a call that gives several, or that under another name."""
    return node.target in _PARTS and isinstance(node.args[0], fx.Node)


def _asked(node: fx.Node, policy: Policy) -> CheckpointPolicy | None:
    answer = policy(node)
    if answer not in _WORDS:
        _refuse("bad-policy", f"the policy answers {answer!r}", 'answer "save", "recompute" or None', node)
    return _WORDS[answer]


def _asked_selective(node: fx.Node, selective: Any) -> CheckpointPolicy | None:
    if not is_operator_overload(node.target):
        return None
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda value: value.meta.get("val"))
    answer = selective(policy_context(node.meta.get("val")), node.target, *args, **kwargs)
    answer = _BOOLEANS[answer] if isinstance(answer, bool) else answer
    if answer not in _KNOWN:
        way_out = "answer MUST_ or PREFER_, SAVE or RECOMPUTE"
        _refuse("bad-policy", f"the policy answers {answer!r}", way_out, node)
    return answer


def _allowed(node: fx.Node, mark: CheckpointPolicy) -> CheckpointPolicy:
    if not has_effect(node) or mark is CheckpointPolicy.MUST_SAVE:
        return mark
    if mark is CheckpointPolicy.MUST_RECOMPUTE:
        text = f"the policy wants {node.target} to be made again, which has an effect"
        way_out = "save it: a second call would draw other random numbers, or act twice"
        _refuse("repeated-effect", text, way_out, node)
    return CheckpointPolicy.MUST_SAVE


def _refuse(code: str, text: str, way_out: str, node: fx.Node | None = None) -> None:
    name = node.name if node is not None else ""
    raise PassError.because(code, text, f"passes.{_NAME}", node=name, way_out=way_out)
