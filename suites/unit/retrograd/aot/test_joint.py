"""The joint graph as a value: passes give another one, errors say which pass it was, and it can be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from retrograd import aot
from retrograd.aot import JointGraph
from retrograd.errors import PassError, VerificationError
from retrograd.passes.aten import remove_dead_code
from unit.retrograd.aot.joint_graphs import marking


def linear() -> JointGraph:
    torch.manual_seed(0)
    return aot.capture(aot.create_state(nn.Linear(3, 2), (torch.ones(4, 3),)))


def doubles_gradients(gm: fx.GraphModule, example_inputs: Any, factor: float = 2.0) -> fx.GraphModule:
    output = gm.graph.output_node()
    (results,) = output.args
    changed = list(results)  # type: ignore[arg-type]
    with gm.graph.inserting_before(output):
        changed[-1] = gm.graph.call_function(torch.ops.aten.mul.Tensor, (changed[-1], factor))
    output.args = (tuple(changed),)
    return gm


def test_a_pass_gives_a_new_graph_and_a_report() -> None:
    joint = linear()
    text = joint.print_readable()
    changed = joint.apply(doubles_gradients).apply(remove_dead_code)
    assert joint.print_readable() == text
    assert [report.name for report in changed.reports] == ["doubles_gradients", "remove_dead_code"]
    assert dict(changed.reports[0].change) == {"aten.mul.Tensor": 1}
    assert joint.reports == ()


def test_passes_get_example_inputs_and_options() -> None:
    seen: list[Any] = []

    def looks(gm: fx.GraphModule, example_inputs: Any, *, answer: int) -> fx.GraphModule:
        seen.append(([tuple(value.shape) for value in example_inputs], answer))
        return gm

    linear().apply(looks, answer=42)
    assert seen == [([(2, 3), (2,), (4, 3), (4, 2)], 42)]


def test_what_a_pass_changes_is_compiled() -> None:
    module, x = nn.Linear(3, 2), torch.ones(4, 3)
    joint = aot.capture(aot.create_state(module, (x,))).apply(doubles_gradients, factor=4.0)
    aot.compile(aot.partition(joint), "eager").flat([module.weight, module.bias, x]).sum().backward()
    torch.testing.assert_close(module.weight.grad, torch.full((2, 3), 16.0), rtol=0, atol=0)
    torch.testing.assert_close(module.bias.grad, torch.full((2,), 4.0), rtol=0, atol=0)


def test_our_passes_go_by_name() -> None:
    changed = linear().apply("remove_dead_code", "remove_dead_code")
    assert [report.name for report in changed.reports] == ["remove_dead_code", "remove_dead_code"]


def test_options_for_several_passes_are_refused() -> None:
    with pytest.raises(PassError, match=r"\(policy\) were given for 2 passes(.|\n)*try +one apply for each"):
        linear().apply(remove_dead_code, remove_dead_code, policy=1)


def test_the_second_pass_that_breaks_the_law_is_named() -> None:
    def mixes(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        output = gm.graph.output_node()
        (results,) = output.args
        output.args = ((results[-1], *results[1:]),)  # type: ignore[index]
        return gm

    changed = linear().apply(remove_dead_code)
    with pytest.raises(VerificationError) as caught:
        changed.apply(mixes)
    assert_expected_inline(
        str(caught.value),
        """\
output 0 depends on the cotangent of boundary 0, and belongs to the forward
  code   joint-dependence
  stage  aot.apply, after passes [remove_dead_code, mixes]        node  t_3 (output 0)
  try    in the pass, keep values that a cotangent reaches out of the forward and of other regions""",
    )


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown pass 'fold'\n  expected  one of remove_dead_code"):
        linear().apply("fold")


def test_recomputation_by_policy_reaches_the_partition() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().exp()

    joint = aot.capture(aot.create_state(fn, (torch.ones(8, requires_grad=True),)))
    kept = aot.partition(joint, "save_all")
    less = aot.partition(joint.apply(marking(lambda node: CheckpointPolicy.MUST_RECOMPUTE)))
    assert kept.saved_bytes > less.saved_bytes == 0


def test_what_reads_a_buffer_that_changes_is_saved_whatever_the_policy_says() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh()), torch.randn(4, 3)
    joint = aot.capture(aot.create_state(module, (x,))).apply(
        marking(lambda node: CheckpointPolicy.MUST_RECOMPUTE)
    )
    state = {name: value.clone() for name, value in module.state_dict().items()}
    leaves = [*module.parameters(), *module.buffers(), x]
    aot.compile(aot.partition(joint, "min_cut"), "eager").flat(leaves).sum().backward()
    found = [parameter.grad for parameter in module.parameters()]
    module.load_state_dict(state)
    module.zero_grad()
    module(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, module.parameters(), strict=True))  # type: ignore[arg-type]


def test_print_readable() -> None:
    assert_expected_inline(
        linear().print_readable(sources=False),
        """\
def joint(
    primals_0: float32[2, 3],  # parameter weight
    primals_1: float32[2],  # parameter bias
    primals_2: float32[4, 3],  # argument args[0]
    tangents_0: float32[4, 2],  # cotangent of boundary 0
):
    t: float32[3, 2] = aten.t.default(primals_0)
    addmm: float32[4, 2] = aten.addmm.default(primals_1, primals_2, t)
    t_1: float32[2, 4] = aten.t.default(tangents_0)
    mm: float32[2, 3] = aten.mm.default(t_1, primals_2)
    t_2: float32[3, 2] = aten.t.default(mm)
    sum_1: float32[1, 2] = aten.sum.dim_IntList(tangents_0, [0], True)
    view: float32[2] = aten.view.default(sum_1, [2])
    t_3: float32[2, 3] = aten.t.default(t_2)
    return (
        addmm,  # output 0
        view,  # gradient of primal 1 from region 0
        t_3,  # gradient of primal 0 from region 0
    )""",
    )


def test_print_readable_shows_source_lines() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    text = aot.capture(aot.create_state(fn, (torch.ones(2),))).print_readable()
    assert 'test_joint.py", line' in text
    assert "in fn" in text
