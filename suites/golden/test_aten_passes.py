"""Each pass over joint graphs: a small graph before and after it, and the same numbers from both."""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.nn import Parameter

from retrograd.passes.aten import (
    JointPass,
    accumulate_in_fp32,
    order_collectives,
    recompute_by_policy,
    remove_dead_code,
    run_passes,
)
from unit.retrograd.aot.joint_graphs import Joint, joint, joint_by_hand, text

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


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


def test_accumulate_in_fp32() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((x @ w + b).sin() @ w + b).sin() @ w

    half = torch.bfloat16
    graph = joint(fn, leaf(64, 4, dtype=half), parameter(4, 4, dtype=half), parameter(4, dtype=half))
    summed = functools.partial(accumulate_in_fp32, many=64)
    assert_expected_inline(
        before_and_after(graph, summed, is_exact=False),
        """\
mm = mm(arg0_1, arg1_1)
add = add.Tensor(mm, arg2_1)
sin = sin(add)
mm_1 = mm(sin, arg1_1)
add_1 = add.Tensor(mm_1, arg2_1)
sin_1 = sin(add_1)
mm_2 = mm(sin_1, arg1_1)
t = t(sin_1)
mm_3 = mm(t, arg3_1)
t_1 = t(arg1_1)
mm_4 = mm(arg3_1, t_1)
cos = cos(add_1)
mul = mul.Tensor(mm_4, cos)
sum_1 = sum.dim_IntList(mul, [0], True)
view = view(sum_1, [4])
t_2 = t(sin)
mm_5 = mm(t_2, mul)
t_3 = t(arg1_1)
mm_6 = mm(mul, t_3)
add_2 = add.Tensor(mm_3, mm_5)
cos_1 = cos(add)
mul_1 = mul.Tensor(mm_6, cos_1)
sum_2 = sum.dim_IntList(mul_1, [0], True)
view_1 = view(sum_2, [4])
add_3 = add.Tensor(view, view_1)
t_4 = t(arg0_1)
mm_7 = mm(t_4, mul_1)
t_5 = t(arg1_1)
mm_8 = mm(mul_1, t_5)
add_4 = add.Tensor(add_2, mm_7)
return (mm_2, mm_8, add_4, add_3)

=>

mm = mm(arg0_1, arg1_1)
add = add.Tensor(mm, arg2_1)
sin = sin(add)
mm_1 = mm(sin, arg1_1)
add_1 = add.Tensor(mm_1, arg2_1)
sin_1 = sin(add_1)
mm_2 = mm(sin_1, arg1_1)
t = t(sin_1)
mm_3 = mm(t, arg3_1)
t_1 = t(arg1_1)
mm_4 = mm(arg3_1, t_1)
cos = cos(add_1)
mul = mul.Tensor(mm_4, cos)
sum_dim_int_list = sum.dim_IntList(mul, [0], True, dtype=float32)
view_default = view(sum_dim_int_list, [4])
t_2 = t(sin)
mm_5 = mm(t_2, mul)
t_3 = t(arg1_1)
mm_6 = mm(mul, t_3)
_to_copy_default = _to_copy(mm_3, dtype=float32)
_to_copy_default_1 = _to_copy(mm_5, dtype=float32)
add_tensor = add.Tensor(_to_copy_default, _to_copy_default_1)
cos_1 = cos(add)
mul_1 = mul.Tensor(mm_6, cos_1)
sum_dim_int_list_1 = sum.dim_IntList(mul_1, [0], True, dtype=float32)
view_default_1 = view(sum_dim_int_list_1, [4])
add_tensor_2 = add.Tensor(view_default, view_default_1)
_to_copy_default_4 = _to_copy(add_tensor_2, dtype=bfloat16)
t_4 = t(arg0_1)
mm_7 = mm(t_4, mul_1)
t_5 = t(arg1_1)
mm_8 = mm(mul_1, t_5)
_to_copy_default_2 = _to_copy(mm_7, dtype=float32)
add_tensor_1 = add.Tensor(add_tensor, _to_copy_default_2)
_to_copy_default_3 = _to_copy(add_tensor_1, dtype=bfloat16)
return (mm_2, mm_8, _to_copy_default_3, _to_copy_default_4)
""",
    )


def test_order_collectives() -> None:
    def build(graph: fx.Graph, inputs: list[fx.Node]) -> tuple[Any, ...]:
        x, cotangent = inputs

        def call(target: Any, *args: Any) -> fx.Node:
            return graph.call_function(target, args)

        y = call(aten.mul.Tensor, x, 2.0)
        first, second = call(aten.mul.Tensor, cotangent, 2.0), call(aten.mul.Tensor, cotangent, 3.0)
        busy = call(aten.sin.default, y)
        one = call(_c10d.all_reduce.default, first, "sum", "group")
        one_done = call(_c10d.wait_tensor.default, one)
        several = call(_c10d.all_reduce_coalesced.default, [second, cotangent], "sum", "group")
        two_done = call(_c10d.wait_tensor.default, call(operator.getitem, several, 0))
        call(_c10d.wait_tensor.default, call(operator.getitem, several, 1))
        busier = call(aten.cos.default, busy)
        return busier, call(aten.add.Tensor, one_done, two_done)

    graph = joint_by_hand(build, (torch.randn(3), torch.randn(3)), 1)
    before = text(graph.gm)
    gm, _ = run_passes(graph.gm, graph.inputs, [order_collectives])
    assert_expected_inline(
        f"{before}\n=>\n\n{text(gm)}",
        """\
mul_tensor = mul.Tensor(primal0, 2.0)
mul_tensor_1 = mul.Tensor(cotangent0, 2.0)
mul_tensor_2 = mul.Tensor(cotangent0, 3.0)
sin_default = sin(mul_tensor)
all_reduce_default = _c10d_functional.all_reduce(mul_tensor_1, sum, group)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
all_reduce_coalesced_default = _c10d_functional.all_reduce_coalesced([mul_tensor_2, cotangent0], sum, group)
getitem = getitem(all_reduce_coalesced_default, 0)
wait_tensor_default_1 = _c10d_functional.wait_tensor(getitem)
getitem_1 = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default_2 = _c10d_functional.wait_tensor(getitem_1)
cos_default = cos(sin_default)
add_tensor = add.Tensor(wait_tensor_default, wait_tensor_default_1)
return (cos_default, add_tensor)

=>

mul_tensor = mul.Tensor(primal0, 2.0)
mul_tensor_1 = mul.Tensor(cotangent0, 2.0)
all_reduce_default = _c10d_functional.all_reduce(mul_tensor_1, sum, group)
mul_tensor_2 = mul.Tensor(cotangent0, 3.0)
all_reduce_coalesced_default = _c10d_functional.all_reduce_coalesced([mul_tensor_2, cotangent0], sum, group)
sin_default = sin(mul_tensor)
getitem = getitem(all_reduce_coalesced_default, 0)
getitem_1 = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default_2 = _c10d_functional.wait_tensor(getitem_1)
cos_default = cos(sin_default)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
wait_tensor_default_1 = _c10d_functional.wait_tensor(getitem)
add_tensor = add.Tensor(wait_tensor_default, wait_tensor_default_1)
return (cos_default, add_tensor)
""",
    )
