"""Each pass over joint graphs: a small graph before and after it, and the same numbers from both."""

from __future__ import annotations

import re
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.passes.aten import (
    JointPass,
    merge_equal_calls,
    remove_dead_code,
    run_passes,
)
from unit.retrograd.aot.joint_graphs import Joint, joint_by_hand, text

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


def test_merge_equal_calls_takes_the_first_of_equal_ones() -> None:
    def build(graph: fx.Graph, inputs: list[fx.Node]) -> tuple[Any, ...]:
        def call(target: Any, *args: Any, **meta: Any) -> fx.Node:
            node = graph.call_function(target, args)
            node.meta.update(meta)
            return node

        x, cotangent = inputs
        casts = [call(aten.exp.default, call(aten.view.default, x, [3, 2])) for _ in range(2)]
        half, other = (call(aten.mul.Tensor, casts[0], number) for number in (0.5, -0.0))
        same, zero = (call(aten.mul.Tensor, casts[1], number) for number in (0.5, 0.0))
        drawn = [call(aten.rand_like.default, x) for _ in range(2)]
        marked = call(aten.sin.default, same, recompute=CheckpointPolicy.MUST_RECOMPUTE)
        plain = call(aten.sin.default, half)
        seen, kept = (call(aten.cos.default, one) for one in (half, same))
        late = [call(aten.sub.Tensor, *both) for both in ((half, other), (other, same))]
        for one in (zero, *drawn, marked, plain, kept, *late):
            seen = call(aten.add.Tensor, seen, call(aten.sum.default, one))
        grad = call(aten.mul.Tensor, cotangent, call(aten.view.default, kept, [6]), is_backward=True)
        return call(aten.view.default, seen, [6]), grad

    graph = joint_by_hand(build, (torch.ones(6), torch.randn(6)), 1)
    assert_expected_inline(
        before_and_after(graph, merge_equal_calls),
        """\
view_default = view(primal0, [3, 2])
exp_default = exp(view_default)
view_default_1 = view(primal0, [3, 2])
exp_default_1 = exp(view_default_1)
mul_tensor = mul.Tensor(exp_default, 0.5)
mul_tensor_1 = mul.Tensor(exp_default, -0.0)
mul_tensor_2 = mul.Tensor(exp_default_1, 0.5)
mul_tensor_3 = mul.Tensor(exp_default_1, 0.0)
rand_like_default = rand_like(primal0)
rand_like_default_1 = rand_like(primal0)
sin_default = sin(mul_tensor_2)  # MUST_RECOMPUTE
sin_default_1 = sin(mul_tensor)
cos_default = cos(mul_tensor)
cos_default_1 = cos(mul_tensor_2)
sub_tensor = sub.Tensor(mul_tensor, mul_tensor_1)
sub_tensor_1 = sub.Tensor(mul_tensor_1, mul_tensor_2)
sum_default = sum(mul_tensor_3)
add_tensor = add.Tensor(cos_default, sum_default)
sum_default_1 = sum(rand_like_default)
add_tensor_1 = add.Tensor(add_tensor, sum_default_1)
sum_default_2 = sum(rand_like_default_1)
add_tensor_2 = add.Tensor(add_tensor_1, sum_default_2)
sum_default_3 = sum(sin_default)
add_tensor_3 = add.Tensor(add_tensor_2, sum_default_3)
sum_default_4 = sum(sin_default_1)
add_tensor_4 = add.Tensor(add_tensor_3, sum_default_4)
sum_default_5 = sum(cos_default_1)
add_tensor_5 = add.Tensor(add_tensor_4, sum_default_5)
sum_default_6 = sum(sub_tensor)
add_tensor_6 = add.Tensor(add_tensor_5, sum_default_6)
sum_default_7 = sum(sub_tensor_1)
add_tensor_7 = add.Tensor(add_tensor_6, sum_default_7)
view_default_2 = view(cos_default_1, [6])
mul_tensor_4 = mul.Tensor(cotangent0, view_default_2)
view_default_3 = view(add_tensor_7, [6])
return (view_default_3, mul_tensor_4)

=>

view_default = view(primal0, [3, 2])
exp_default = exp(view_default)
mul_tensor = mul.Tensor(exp_default, 0.5)
mul_tensor_1 = mul.Tensor(exp_default, -0.0)
mul_tensor_3 = mul.Tensor(exp_default, 0.0)
rand_like_default = rand_like(primal0)
rand_like_default_1 = rand_like(primal0)
sin_default = sin(mul_tensor)  # MUST_RECOMPUTE
sin_default_1 = sin(mul_tensor)
cos_default = cos(mul_tensor)
sub_tensor = sub.Tensor(mul_tensor, mul_tensor_1)
sub_tensor_1 = sub.Tensor(mul_tensor_1, mul_tensor)
sum_default = sum(mul_tensor_3)
add_tensor = add.Tensor(cos_default, sum_default)
sum_default_1 = sum(rand_like_default)
add_tensor_1 = add.Tensor(add_tensor, sum_default_1)
sum_default_2 = sum(rand_like_default_1)
add_tensor_2 = add.Tensor(add_tensor_1, sum_default_2)
sum_default_3 = sum(sin_default)
add_tensor_3 = add.Tensor(add_tensor_2, sum_default_3)
sum_default_4 = sum(sin_default_1)
add_tensor_4 = add.Tensor(add_tensor_3, sum_default_4)
sum_default_5 = sum(cos_default)
add_tensor_5 = add.Tensor(add_tensor_4, sum_default_5)
sum_default_6 = sum(sub_tensor)
add_tensor_6 = add.Tensor(add_tensor_5, sum_default_6)
sum_default_7 = sum(sub_tensor_1)
add_tensor_7 = add.Tensor(add_tensor_6, sum_default_7)
view_default_2 = view(cos_default, [6])
mul_tensor_4 = mul.Tensor(cotangent0, view_default_2)
view_default_3 = view(add_tensor_7, [6])
return (view_default_3, mul_tensor_4)
""",
    )


def test_merge_equal_calls_keeps_apart_what_can_be_seen_and_what_is_far_apart() -> None:
    def build(graph: fx.Graph, inputs: list[fx.Node]) -> tuple[Any, ...]:
        x, cotangent = inputs
        first, second, inside = (graph.call_function(aten.exp.default, (x,)) for _ in range(3))
        near = graph.call_function(aten.sin.default, (x,))
        for _ in range(50):
            inside = graph.call_function(aten.neg.default, (inside,))
        far = graph.call_function(aten.sin.default, (x,))
        total = graph.call_function(aten.add.Tensor, (near, far))
        shown = graph.call_function(aten.view.default, (second, [3, 1]))
        return first, shown, inside, total, graph.call_function(aten.mul.Tensor, (cotangent, far))

    graph = joint_by_hand(build, (torch.ones(3), torch.randn(3)), 1, outputs=4)
    before, after = before_and_after(graph, merge_equal_calls).split("=>")
    assert before.split() == after.split()


def test_merge_equal_calls_makes_what_every_layer_keeps_once_and_first() -> None:
    def build(graph: fx.Graph, inputs: list[fx.Node]) -> tuple[Any, ...]:
        def call(target: Any, *args: Any) -> fx.Node:
            return graph.call_function(target, args)

        x, cotangent = inputs
        grad, kept = cotangent, []
        h = call(aten.sin.default, x)
        for _ in range(3):
            mask = call(aten.add.Tensor, call(aten.exp.default, x), call(aten.full.default, [], 2.0))
            unread = call(aten.cos.default, x)
            h = call(aten.mul.Tensor, h, mask)
            h = call(aten.sub.Tensor, h, unread)
            for _ in range(48):
                h = call(aten.neg.default, h)
            kept.append(mask)
        for mask in kept[::-1]:
            grad = call(aten.mul.Tensor, grad, mask)
            grad.meta["is_backward"] = True
        return h, grad

    graph = joint_by_hand(build, (torch.ones(3), torch.randn(3)), 1)
    lines = before_and_after(graph, merge_equal_calls).split("=>")[1].splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if "neg(" not in line),
        """\


full_default = full([], 2.0)
exp_default = exp(primal0)
add_tensor = add.Tensor(exp_default, full_default)
sin_default = sin(primal0)
cos_default = cos(primal0)
mul_tensor = mul.Tensor(sin_default, add_tensor)
sub_tensor = sub.Tensor(mul_tensor, cos_default)
cos_default_1 = cos(primal0)
mul_tensor_1 = mul.Tensor(neg_default_47, add_tensor)
sub_tensor_1 = sub.Tensor(mul_tensor_1, cos_default_1)
cos_default_2 = cos(primal0)
mul_tensor_2 = mul.Tensor(neg_default_95, add_tensor)
sub_tensor_2 = sub.Tensor(mul_tensor_2, cos_default_2)
mul_tensor_3 = mul.Tensor(cotangent0, add_tensor)
mul_tensor_4 = mul.Tensor(mul_tensor_3, add_tensor)
mul_tensor_5 = mul.Tensor(mul_tensor_4, add_tensor)
return (neg_default_143, mul_tensor_5)""",
    )
