"""Golden texts: what is captured, and what the passes make of it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import retrograd
from retrograd.engine.request import LiveBackward
from retrograd.graph.backward_graph import BackwardGraph, readable
from retrograd.live.capture.segments import cut
from retrograd.live.captured import CapturedBackward
from retrograd.passes.eager_reordering import verify_layout
from unit.retrograd.programs import leaf


def names(text: str) -> str:
    """The calls without their checks and projections, which say nothing here."""
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if "getitem(" not in line and "validate_outputs(" not in line)


def captured(root: Tensor) -> tuple[BackwardGraph, BackwardGraph]:
    """The graph in the engine's order, and in eager's."""
    kept: list[BackwardGraph] = []
    original = CapturedBackward.__init__

    def keep(self: CapturedBackward, graph: BackwardGraph, backward: LiveBackward) -> None:
        kept.append(graph)
        original(self, graph, backward)

    CapturedBackward.__init__ = keep  # type: ignore[method-assign]
    try:
        with retrograd.compiled_autograd("eager", strict=True) as context:
            root.backward()
    finally:
        CapturedBackward.__init__ = original  # type: ignore[method-assign]
    return kept[0], context.explain().backwards[0].graph


def branches() -> Tensor:
    """Two branches; the engine walks into the one built first, eager runs the one built last."""
    w = leaf()
    one = w.sin()
    two = w.cos()
    three = w.exp()
    two.register_hook(lambda grad: None)
    return (two * three + one).sum()


def test_capture_records_the_engines_walk() -> None:
    engine_order, _ = captured(branches())
    assert_expected_inline(
        names(readable(engine_order)),
        """\
backward(input_0, input_1, input_2, input_3, input_4, hook_0):
  # torch::autograd::GraphRoot (0 of 8)
  # SumBackward0 (1 of 8)
    sum_backward0 = SumBackward0([getitem], [True], [4, 3])
  # AddBackward0 (2 of 8)
    add_backward0 = AddBackward0([getitem_2], [True, True], 1, 6, 6)
  # SinBackward0 (3 of 8)
    sin_backward0 = SinBackward0([getitem_6], [True], input_1)
  # MulBackward0 (4 of 8)
    mul_backward0 = MulBackward0([getitem_5], [True, True], input_2, 6, input_3, 6)
  # ExpBackward0 (5 of 8)
    exp_backward0 = ExpBackward0([getitem_12], [True], input_4)
    sum_gradients = sum_gradients(getitem_8, getitem_14)
  # CosBackward0 (6 of 8)
    call_tensor_hook = call_tensor_hook(hook_0, getitem_11)  # tensor hook
    cos_backward0 = CosBackward0([call_tensor_hook], [True], input_1)
    sum_gradients_1 = sum_gradients(getitem_8, getitem_14, getitem_16)
  # torch::autograd::AccumulateGrad (7 of 8)
    accumulate_grad = accumulate_grad(input_1, sum_gradients_1, False)
  return ()""",
    )


def test_the_layout_is_eagers_and_so_is_the_association_of_sums() -> None:
    _, eager_order = captured(branches())
    assert_expected_inline(
        names(readable(eager_order)),
        """\
backward(input_0, input_1, input_2, input_3, input_4, hook_0):
  # torch::autograd::GraphRoot (0 of 8)
  # SumBackward0 (1 of 8)
    sum_backward0 = SumBackward0([getitem], [True], [4, 3])
  # AddBackward0 (2 of 8)
    add_backward0 = AddBackward0([getitem_2], [True, True], 1, 6, 6)
  # MulBackward0 (4 of 8)
    mul_backward0 = MulBackward0([getitem_5], [True, True], input_2, 6, input_3, 6)
  # ExpBackward0 (5 of 8)
    exp_backward0 = ExpBackward0([getitem_12], [True], input_4)
  # CosBackward0 (6 of 8)
    call_tensor_hook = call_tensor_hook(hook_0, getitem_11)  # tensor hook
    cos_backward0 = CosBackward0([call_tensor_hook], [True], input_1)
    sum_gradients = sum_gradients(getitem_14, getitem_16)
  # SinBackward0 (3 of 8)
    sin_backward0 = SinBackward0([getitem_6], [True], input_1)
    sum_gradients_1 = sum_gradients(sum_gradients, getitem_8)
  # torch::autograd::AccumulateGrad (7 of 8)
    accumulate_grad = accumulate_grad(input_1, sum_gradients_1, False)
  return ()""",
    )


def test_a_backward_without_user_code_is_one_segment() -> None:
    w, v = leaf(), leaf()
    _, backward = captured(((w * v).sin() + w).sum())
    schedule = cut(backward, {})
    assert [type(step).__name__ for step in schedule.steps] == ["Segment", "Accumulation", "Accumulation"]
    assert schedule.segments[0].worth_compiling


def test_views_between_hooks_are_not_worth_compiling() -> None:
    """The hook of a layer's bias runs before its weight's gradient is transposed."""
    linear = torch.nn.Linear(3, 3)
    linear.bias.register_post_accumulate_grad_hook(lambda bias: None)
    _, backward = captured(linear(torch.ones(2, 3)).sum())
    flags = [segment.worth_compiling for segment in cut(backward, {}).segments]
    assert flags == [True, False]


def test_a_hook_cuts_and_accumulations_before_it_are_done() -> None:
    w, v = leaf(), leaf()
    y = v.sin()
    y.register_hook(lambda grad: None)
    _, backward = captured((y * w).sum())
    kinds = [type(step).__name__ for step in cut(backward, {}).steps]
    assert kinds == ["Segment", "Accumulation", "OpaqueCall", "Segment", "Accumulation"]


def test_a_name_that_no_node_has_is_noted_with_the_nearest_one() -> None:
    x = torch.ones(2, requires_grad=True)
    with retrograd.compiled_autograd("eager", opaque=["SinBackwrd0", "SinBackward0", "Unlike"]) as context:
        x.sin().sum().backward()
    (backward,) = context.explain().backwards
    assert [(reason.code, reason.text) for reason in backward.notes] == [
        ("opaque-unmatched", "no node is called 'SinBackwrd0' (opaque=); did you mean 'SinBackward0'?"),
        ("opaque-unmatched", "no node is called 'Unlike' (opaque=)"),
    ]


def test_a_named_node_is_opaque() -> None:
    w = leaf()
    with retrograd.compiled_autograd("aten", opaque=["SinBackward0"]) as context:
        w.sin().cos().sum().backward()
    (opaque,) = context.explain().backwards[0].schedule.opaque_calls
    assert (opaque.node.target.__name__, opaque.reason) == ("SinBackward0", "named in opaque=")
    expected = leaf()
    expected.sin().cos().sum().backward()
    torch.testing.assert_close(w.grad, expected.grad)


def test_an_opaque_node_refuses_a_saved_tensor_that_a_hook_has_changed() -> None:
    x, factor = leaf(), torch.ones(4, 3)
    y = (x * factor).sin()
    y.register_hook(lambda grad: factor.add_(1))
    context = retrograd.compiled_autograd("eager", opaque=["MulBackward0"])
    with context, pytest.raises(RuntimeError, match="is at version 1; expected version 0 instead"):
        y.sum().backward()


def test_values_die_with_their_last_reader() -> None:
    w = leaf()
    _, backward = captured((w.sin() * w.cos()).sum())
    schedule = cut(backward, {})
    read_later: set[object] = set()
    for step, dying in reversed(list(zip(schedule.steps, schedule.dying, strict=True))):
        nodes = step.nodes if hasattr(step, "nodes") else (step.node,)
        used = {arg for node in nodes for arg in node.all_input_nodes}
        assert not dying & read_later
        read_later |= used


def test_the_report_shows_all_graphs() -> None:
    w = leaf()
    report = retrograd.explain(lambda: w.sin().sum().backward(), backend="aten")
    text = report.print_readable(print_output=False)
    assert "SinBackward0 (2 of 4)" in text
    assert "torch.ops.aten.cos.default" in text


def test_late_hooks_run_where_eager_runs_them() -> None:
    def events(context: contextlib.AbstractContextManager[object]) -> list[str]:
        seen: list[str] = []
        w = leaf()
        y = w.sin()
        z = y.exp()
        gone = y.register_hook(lambda grad: seen.append("gone"))
        y.register_hook(lambda grad: seen.append("there before"))

        def change(grad: Tensor) -> None:
            gone.remove()
            y.register_hook(lambda g: seen.append("late tensor hook"))
            y.grad_fn.register_prehook(lambda g: seen.append("late pre hook"))
            y.grad_fn.register_hook(lambda i, o: seen.append("late post hook"))
            w.register_hook(lambda g: seen.append("late leaf hook"))
            w.register_post_accumulate_grad_hook(lambda p: seen.append("late accumulate hook"))
            z.register_hook(lambda g: seen.append("too late"))

        z.register_hook(change)
        root = z.sum()
        with context:
            root.backward()
        return seen

    expected = [
        "there before",
        "late tensor hook",
        "late pre hook",
        "late post hook",
        "late leaf hook",
        "late accumulate hook",
    ]
    assert events(contextlib.nullcontext()) == expected
    assert events(retrograd.compiled_autograd("aten", strict=True)) == expected


def test_the_users_line_is_shown_where_torch_knows_it() -> None:
    w = leaf()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        root = w.sin().sum()
    _, backward = captured(root)
    assert "test_graphs.py" in backward.node_calls[1].source
    assert "root = w.sin().sum()" in readable(backward)


def without(backward: BackwardGraph, name: str) -> BackwardGraph:
    """A copy of `backward` that does not make the calls called `name`."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(backward.graph, {}))
    for node in reversed(graph.nodes):
        if getattr(node.target, "__name__", "") == name and not node.users:
            graph.erase_node(node)
    return backward.with_graph(graph)


def test_a_layout_that_loses_a_call_is_refused() -> None:
    engine_order, eager_order = captured(branches())
    verify_layout(engine_order, eager_order)
    with pytest.raises(retrograd.VerificationError, match="accumulate_grad is made too rarely"):
        verify_layout(engine_order, without(eager_order, "accumulate_grad"))
    with pytest.raises(retrograd.VerificationError, match="accumulate_grad is made too often"):
        verify_layout(without(engine_order, "accumulate_grad"), eager_order)


def test_a_layout_that_reads_too_early_is_refused() -> None:
    engine_order, eager_order = captured(branches())
    accumulate = next(
        n for n in eager_order.graph.nodes if getattr(n.target, "__name__", "") == "accumulate_grad"
    )
    next(node for node, _ in eager_order.calls()).prepend(accumulate)
    with pytest.raises(retrograd.VerificationError, match="before it is there"):
        verify_layout(engine_order, eager_order)
