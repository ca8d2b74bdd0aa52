"""The runner of passes: reports, the laws after each pass, and errors that say which pass it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from retrograd.errors import PassError, VerificationError
from retrograd.graph.joint import Primal, verify_joint
from retrograd.passes.aten import remove_dead_code, run_passes
from unit.retrograd.aot.joint_graphs import Joint, interpreted, joint, joint_by_hand

aten = torch.ops.aten
Pass = Callable[..., Any]


def leaf(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


@pytest.fixture
def graph() -> Joint:
    """Two outputs with a region each: outputs 0 and 1, then the gradients of x and y from each."""
    return joint(lambda x, y: ((x * y).sin(), (x + y).exp()), leaf(3), leaf(3), is_divided=True)


def with_outputs(gm: fx.GraphModule, change: Callable[[list[Any]], list[Any]]) -> fx.GraphModule:
    output = gm.graph.output_node()
    output.args = (tuple(change(list(output.args[0]))),)
    gm.recompile()
    return gm


def adds_a_placeholder(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("more")
    return gm


def removes_a_placeholder(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    *_, last = gm.graph.find_nodes(op="placeholder")
    first = next(iter(gm.graph.nodes))
    last.replace_all_uses_with(first)
    gm.graph.erase_node(last)
    return gm


def removes_an_output(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    return with_outputs(gm, lambda outputs: outputs[:-1])


def adds_an_output(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    return with_outputs(gm, lambda outputs: [*outputs, outputs[0]])


def gives_a_gradient_as_output(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    return with_outputs(gm, lambda outputs: [outputs[2], *outputs[1:]])


def mixes_regions(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    return with_outputs(gm, lambda outputs: [*outputs[:2], outputs[4], *outputs[3:]])


def sums_an_output(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        value = gm.graph.call_function(aten.sum.default, (output.args[0][0],))
    value.meta["val"] = output.args[0][0].meta["val"].sum()
    return with_outputs(gm, lambda outputs: [value, *outputs[1:]])


def forgets_an_output(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    return with_outputs(gm, lambda outputs: [None, *outputs[1:]])


def changes_in_place(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        gm.graph.call_function(aten.mul_.Tensor, (output.args[0][0], 2))
    return gm


def reads_before_it_is_there(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    calls[0].args = (calls[-1], *calls[0].args[1:])
    return gm


LAWS: list[tuple[Pass, str, str, str]] = [
    (adds_a_placeholder, "joint-inputs", "5 placeholders where the signature has 4 inputs", ""),
    (
        removes_a_placeholder,
        "joint-inputs",
        "3 placeholders where the signature has 4",
        "cotangent of boundary 1",
    ),
    (
        removes_an_output,
        "joint-outputs",
        "5 outputs where the signature has 6",
        "gradient of primal 1 from region 1",
    ),
    (adds_an_output, "joint-outputs", "7 outputs where the signature has 6", ""),
    (
        gives_a_gradient_as_output,
        "joint-dependence",
        "output 0 depends on the cotangent of boundary 0",
        "output 0",
    ),
    (
        mixes_regions,
        "joint-dependence",
        "region 0 depends on the cotangent of boundary 1, which is no root of its region",
        "gradient of primal 0 from region 0",
    ),
    (sums_an_output, "joint-outputs", "output 0 is float32[] and was float32[3]", "output 0"),
    (forgets_an_output, "joint-outputs", "output 0 is None and was float32[3]", "output 0"),
    (changes_in_place, "joint-mutation", "aten.mul_.Tensor changes a tensor in place", "mul__tensor"),
    (reads_before_it_is_there, "joint-lint", "the graph is not well formed", ""),
]


@pytest.mark.parametrize(("one", "code", "message", "node"), LAWS, ids=[law[0].__name__ for law in LAWS])
def test_a_pass_that_breaks_a_law_is_named(
    graph: Joint, one: Pass, code: str, message: str, node: str
) -> None:
    with pytest.raises(VerificationError) as raised:
        run_passes(graph.gm, graph.inputs, [remove_dead_code, one], earlier=["own"])
    reason = raised.value.reason
    assert reason.code == code
    assert message in reason.text
    assert node in reason.node
    assert reason.stage == f"aot.apply, after passes [own, remove_dead_code, {one.__name__}]"
    assert reason.way_out


def test_writing_a_new_value_into_a_primal_at_the_end_is_allowed() -> None:
    def build(graph: fx.Graph, inputs: list[fx.Node], is_last: bool) -> tuple[Any, ...]:
        x, cotangent = inputs
        new = graph.call_function(aten.mul.Tensor, (x, 2))
        if is_last:
            value = graph.call_function(aten.mul.Tensor, (new, cotangent))
        graph.call_function(aten.copy_.default, (x, new))
        if not is_last:
            value = graph.call_function(aten.mul.Tensor, (new, cotangent))
        return new, value

    examples = (torch.randn(3), torch.randn(3))
    good = joint_by_hand(functools.partial(build, is_last=True), examples, 1)
    verify_joint(good.gm, good.signature, "test")
    bad = joint_by_hand(functools.partial(build, is_last=False), examples, 1)
    with pytest.raises(VerificationError, match=r"copy_\.default changes a tensor in place"):
        verify_joint(bad.gm, bad.signature, "test")


def test_an_exception_in_a_pass_is_wrapped(graph: Joint) -> None:
    def divides(gm: fx.GraphModule, example_inputs: Any, by: int) -> fx.GraphModule:
        len(example_inputs) // by
        return gm

    with pytest.raises(PassError) as raised:
        run_passes(graph.gm, graph.inputs, [remove_dead_code, functools.partial(divides, by=0)])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "pass divides failed: ZeroDivisionError" in str(raised.value)
    assert "after passes [remove_dead_code]" in str(raised.value)


def test_a_pass_that_returns_nothing_is_refused(graph: Joint) -> None:
    with pytest.raises(PassError, match="it returned NoneType, not a Graph"):
        run_passes(graph.gm, graph.inputs, [lambda gm, example_inputs: None])  # type: ignore[list-item, arg-type]


def test_a_pass_may_not_change_the_signature(graph: Joint) -> None:
    def renames(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        signature = gm.meta["signature"]
        gm.meta["signature"] = replace(signature, inputs=(Primal(0, "other"), *signature.inputs[1:]))
        return gm

    with pytest.raises(VerificationError, match="the pass gave the graph another signature"):
        run_passes(graph.gm, graph.inputs, [renames])


def test_a_pass_may_return_another_module(graph: Joint) -> None:
    def doubles(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        copied = fx.Graph()
        output = copied.graph_copy(gm.graph, {})
        doubled = copied.call_function(aten.mul.Tensor, (output[0], 2))
        copied.output((doubled, *output[1:]))
        return fx.GraphModule(gm, copied) if example_inputs else gm

    expected = graph.run()
    gm, (report,) = run_passes(graph.gm, graph.inputs, [doubles])
    assert gm is not graph.gm
    assert gm.meta["signature"] == graph.signature
    assert torch.equal(interpreted(gm, graph.inputs)[0], expected[0] * 2)
    assert report.change == {"aten.mul.Tensor": 1}


def test_reports_say_what_changed() -> None:
    graph = joint(lambda x: x * (torch.ones(3) + torch.ones(3)), leaf(3))

    def merges_ones(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.ones.default)
        second.replace_all_uses_with(first)
        gm.graph.erase_node(second)
        return gm

    passes = [merges_ones, remove_dead_code]
    gm, (merged, dead) = run_passes(graph.gm, graph.inputs, passes)
    assert merged.change == {"aten.ones.default": -1}
    assert str(merged).endswith("ms, -1 aten.ones.default")
    assert str(dead).endswith("ms, the same operators")
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.ones.default)) == 1
    assert merged.seconds > 0
