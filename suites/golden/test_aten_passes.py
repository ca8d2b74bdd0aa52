"""Each pass over joint graphs: a small graph before and after it, and the same numbers from both."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.nn import Parameter

from retrograd.passes.aten import (
    JointPass,
    recompute_by_policy,
    remove_dead_code,
    run_passes,
)
from unit.retrograd.aot.joint_graphs import Joint, joint, joint_by_hand, text

aten = torch.ops.aten


#: a saved result, kept without its history: `detach` as torch traced it once, `alias` in newer releases.
ALIASED = re.compile(r"\balias(_\d+)?\b")


def before_and_after(graph: Joint, one: JointPass, is_exact: bool = True) -> str:
    """The texts; in between, the numbers are compared."""
    before, expected = text(graph.gm), graph.run()
    gm, _ = run_passes(graph.gm, graph.inputs, [one])
    found = Joint(gm, graph.inputs).run()
    if is_exact:
        for one_found, one_expected in zip(found, expected, strict=True):
            torch.testing.assert_close(one_found, one_expected, rtol=0, atol=0, equal_nan=True)
    return f"{before}\n=>\n\n{text(gm)}"


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, dtype=dtype, requires_grad=True)


def parameter(*sizes: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.randn(*sizes, dtype=dtype))


def test_remove_dead_code_keeps_effects() -> None:
    def build(graph: fx.Graph, inputs: list[fx.Node]) -> tuple[Any, ...]:
        x, cotangent = inputs
        unread = graph.call_function(aten.exp.default, (x,))
        graph.call_function(aten.sin.default, (unread,))
        graph.call_function(aten.rand_like.default, (x,))
        is_finite = graph.call_function(aten.all.default, (x,))
        graph.call_function(aten._assert_async.msg, (is_finite, "some are zero"))
        graph.call_function(torch.ops.higher_order.print, ("seen",))
        drawn = graph.call_function(aten.rand_like.default, (x,))
        y = graph.call_function(aten.mul.Tensor, (x, drawn))
        return y, graph.call_function(aten.mul.Tensor, (cotangent, drawn))

    graph = joint_by_hand(build, (torch.ones(3), torch.randn(3)), 1)
    assert_expected_inline(
        before_and_after(graph, remove_dead_code),
        """\
exp_default = exp(primal0)
sin_default = sin(exp_default)
rand_like_default = rand_like(primal0)
all_default = all(primal0)
_assert_async_msg = _assert_async.msg(all_default, some are zero)
print_1 = print(seen)
rand_like_default_1 = rand_like(primal0)
mul_tensor = mul.Tensor(primal0, rand_like_default_1)
mul_tensor_1 = mul.Tensor(cotangent0, rand_like_default_1)
return (mul_tensor, mul_tensor_1)

=>

rand_like_default = rand_like(primal0)
all_default = all(primal0)
_assert_async_msg = _assert_async.msg(all_default, some are zero)
print_1 = print(seen)
rand_like_default_1 = rand_like(primal0)
mul_tensor = mul.Tensor(primal0, rand_like_default_1)
mul_tensor_1 = mul.Tensor(cotangent0, rand_like_default_1)
return (mul_tensor, mul_tensor_1)
""",
    )


def test_recompute_by_policy() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout((x @ w).sigmoid(), 0.5, True)[0].exp()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> torch.utils.checkpoint.CheckpointPolicy:
        kinds = torch.utils.checkpoint.CheckpointPolicy
        return kinds.MUST_SAVE if op is aten.mm.default else kinds.PREFER_RECOMPUTE

    graph = joint(fn, leaf(2, 3), parameter(3, 3))
    marked = functools.partial(recompute_by_policy, selective=policy)
    assert_expected_inline(
        ALIASED.sub(r"detach\1", before_and_after(graph, marked)),
        """\
mm = mm(arg0_1, arg1_1)
sigmoid = sigmoid(mm)
detach = detach(sigmoid)
native_dropout = native_dropout(sigmoid, 0.5, True)
getitem = getitem(native_dropout, 0)
getitem_1 = getitem(native_dropout, 1)
exp = exp(getitem)
detach_1 = detach(exp)
detach_2 = detach(detach_1)
mul = mul.Tensor(arg2_1, detach_2)
native_dropout_backward = native_dropout_backward(mul, getitem_1, 2.0)
detach_3 = detach(detach)
sigmoid_backward = sigmoid_backward(native_dropout_backward, detach_3)
t = t(arg0_1)
mm_1 = mm(t, sigmoid_backward)
t_1 = t(arg1_1)
mm_2 = mm(sigmoid_backward, t_1)
return (exp, mm_2, mm_1)

=>

mm = mm(arg0_1, arg1_1)  # MUST_SAVE
sigmoid = sigmoid(mm)  # PREFER_RECOMPUTE
detach = detach(sigmoid)  # PREFER_RECOMPUTE
native_dropout = native_dropout(sigmoid, 0.5, True)  # MUST_SAVE
getitem = getitem(native_dropout, 0)  # MUST_SAVE
getitem_1 = getitem(native_dropout, 1)  # MUST_SAVE
exp = exp(getitem)  # PREFER_RECOMPUTE
detach_1 = detach(exp)  # PREFER_RECOMPUTE
detach_2 = detach(detach_1)  # PREFER_RECOMPUTE
mul = mul.Tensor(arg2_1, detach_2)
native_dropout_backward = native_dropout_backward(mul, getitem_1, 2.0)
detach_3 = detach(detach)  # PREFER_RECOMPUTE
sigmoid_backward = sigmoid_backward(native_dropout_backward, detach_3)
t = t(arg0_1)  # PREFER_RECOMPUTE
mm_1 = mm(t, sigmoid_backward)
t_1 = t(arg1_1)  # PREFER_RECOMPUTE
mm_2 = mm(sigmoid_backward, t_1)
return (exp, mm_2, mm_1)
""",
    )
