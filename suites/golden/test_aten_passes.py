"""Each pass over joint graphs: a small graph before and after it, and the same numbers from both."""

from __future__ import annotations

import re
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.nn import Parameter

from retrograd.passes.aten import (
    JointPass,
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
