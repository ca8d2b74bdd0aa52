"""The joint graph: what its placeholders and outputs mean, and what every node says of its origin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd import aot
from retrograd.errors import CaptureError
from unit.retrograd.aot.against_eager import agree, captured, leaf, plain, tensor

aten = torch.ops.aten


def calls(joint: aot.JointGraph) -> list[Any]:
    return [node.target for node in joint.gm.graph.nodes if node.op == "call_function"]


def inputs(joint: aot.JointGraph) -> list[str]:
    return [str(role) for role in joint.signature.inputs]


def outputs(joint: aot.JointGraph) -> list[str]:
    return [str(role) for role in joint.signature.outputs]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.scale)


def test_roles_of_a_function() -> None:
    joint = captured(lambda x, y: (x * y).sin(), leaf(3), tensor(3))
    assert inputs(joint) == ["argument args[0]", "argument args[1]", "cotangent of boundary 0"]
    assert outputs(joint) == ["output 0", "gradient of primal 0 from region 0"]
    assert calls(joint) == [
        aten.mul.Tensor,
        aten.sin.default,
        aten.cos.default,
        aten.mul.Tensor,
        aten.mul.Tensor,
    ]


def test_roles_of_a_module() -> None:
    joint = captured(Model(), tensor(2, 3))
    assert inputs(joint) == [
        "parameter first.weight",
        "parameter first.bias",
        "parameter last.weight",
        "buffer scale",
        "argument args[0]",
        "cotangent of boundary 0",
    ]
    assert outputs(joint) == ["output 0", *(f"gradient of primal {i} from region 0" for i in (2, 1, 0))]


def test_arguments_are_named_by_their_place_in_a_tree() -> None:
    joint = captured(lambda pair, *, by: pair[0]["x"] * by, ({"x": leaf(2)}, 3), kwargs={"by": tensor(2)})
    assert inputs(joint)[:2] == ["argument args[0][0]['x']", "argument by"]


def test_without_grad_there_is_no_backward_half() -> None:
    joint = captured(lambda x: x.sin(), tensor(3))
    assert (inputs(joint), outputs(joint)) == (["argument args[0]"], ["output 0"])
    with torch.no_grad():
        inference = captured(lambda x: x.sin(), leaf(3))
    assert (inputs(inference), outputs(inference)) == (["argument args[0]"], ["output 0"])
    assert not inference.signature.regions


def test_outputs_that_need_no_grad_get_no_cotangent() -> None:
    joint = captured(lambda x, y: (x.sin(), y.cos(), x.argmax()), leaf(3), tensor(3))
    assert inputs(joint) == ["argument args[0]", "argument args[1]", "cotangent of boundary 0"]
    assert [value.boundary for value in joint.values] == [0, None, None]


def test_a_hidden_tensor_where_two_outputs_meet_is_a_boundary() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        return h.sin(), h.exp()

    joint = captured(fn, leaf(3))
    assert [(j.value, j.is_visible) for j in joint.signature.boundaries] == [(0, True), (1, True), (2, False)]
    assert [region.roots for region in joint.signature.regions] == [(1,), (0,), (2,)]
    together = aot.capture(aot.create_state(fn, (leaf(3),)), single_region=True)
    assert [region.roots for region in together.signature.regions] == [(0, 1)]
    assert outputs(together) == ["output 0", "output 1", "gradient of primal 0 from region 0"]


def test_the_graph_is_functional_and_without_dead_code() -> None:
    def fn(x: Tensor) -> Tensor:
        x.exp()
        y = x.clone()
        y.mul_(2)
        y[0].add_(1)
        return y.sin()

    joint = captured(fn, leaf(2, 3))
    assert aten.exp.default not in calls(joint)
    assert not any(call._schema.is_mutable for call in calls(joint) if hasattr(call, "_schema"))


def test_nodes_tell_where_they_come_from() -> None:
    joint = captured(Model(), tensor(2, 3))
    nodes = [node for node in joint.gm.graph.nodes if node.op == "call_function"]
    backward = [node for node in nodes if node.meta.get("is_backward")]
    assert backward
    assert all(isinstance(node.meta["seq_nr"], int) for node in nodes)
    assert {node.meta["region"] for node in backward} == {0}
    assert {node.meta["autograd_node"] for node in backward} >= {"TanhBackward0", "MulBackward0"}
    (tanh,) = [node for node in nodes if node.target is aten.tanh.default]
    assert f'"{__file__}"' in tanh.meta["stack_trace"]


def test_forward_and_backward_of_one_call_share_a_sequence_number() -> None:
    joint = captured(lambda x: x.sin().exp(), leaf(3))
    nodes = {node.target: node for node in joint.gm.graph.nodes if node.op == "call_function"}
    assert nodes[aten.sin.default].meta["seq_nr"] == nodes[aten.cos.default].meta["seq_nr"]


def test_decompositions_are_applied() -> None:
    table = torch._decomp.get_decompositions([aten.silu])
    joint = captured(nn.functional.silu, leaf(3), decompositions=table)
    assert aten.silu.default not in calls(joint)
    assert aten.silu.default in calls(captured(nn.functional.silu, leaf(3)))


def test_symbolic_sizes() -> None:
    joint = captured(lambda x: x.reshape(-1) * x.shape[0], leaf(3, 4), dynamic=True)
    placeholder = next(iter(joint.gm.graph.nodes))
    assert all(isinstance(size, torch.SymInt) for size in placeholder.meta["val"].shape)
    static = captured(lambda x: x.reshape(-1) * x.shape[0], leaf(3, 4))
    assert tuple(next(iter(static.gm.graph.nodes)).meta["val"].shape) == (3, 4)


def test_tensors_that_the_function_finds_are_primals() -> None:
    scale = leaf(3)
    joint = captured(lambda x: x * scale, tensor(3))
    assert joint.primals[1].found is scale
    assert outputs(joint) == ["output 0", "gradient of primal 1 from region 0"]


def test_tensors_seen_from_inside_torch_are_not_taken_for_found_ones() -> None:
    mask = tensor(3, 3) > 0
    agree(lambda x: torch.masked.sum(x, 1, mask=mask), plain(leaf(3, 3)))


def test_a_forward_written_in_python_keeps_the_bits_of_eagers_kernel() -> None:
    agree(lambda x: nn.functional.interpolate(x, scale_factor=1.7, mode="bilinear"), plain(leaf(1, 2, 5, 5)))


def test_the_gradient_of_a_returned_view_has_the_bits_of_eagers_view() -> None:
    agree(lambda x: x.expand(20, 5, 3), plain(leaf(5, 1)))


def test_hooks_are_not_captured() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad)
        return y.sin()

    with pytest.raises(CaptureError) as refused:
        captured(fn, leaf(3))
    assert refused.value.reason.code == "hook-in-trace"


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        pytest.param(lambda x: x * x.sum().item(), "_local_scalar_dense", id="item"),
        pytest.param(lambda x: x[x > 0], "aten.", id="sizes that depend on data"),
    ],
)
def test_what_depends_on_data_is_refused(fn: Any, text: str) -> None:
    with pytest.raises(CaptureError) as refused:
        captured(fn, leaf(3))
    assert (refused.value.reason.stage, refused.value.reason.code) == ("aot.capture", "trace-failed")
    assert text in refused.value.reason.text


@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
def test_random_numbers_seeded_inside_are_those_of_eager() -> None:
    def fn(x: Tensor) -> Tensor:
        torch.manual_seed(42)
        return torch.rand(3) * x

    compiled = aot.function(fn, backend="eager")
    x = leaf(3)
    torch.manual_seed(0)
    expected = [fn(x), torch.rand(1)]
    torch.manual_seed(0)
    compiled(x)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip([compiled(x), torch.rand(1)], expected, strict=True))


def test_capturing_leaves_the_world_as_it_was() -> None:
    x = leaf(3)
    torch.manual_seed(3)
    captured(lambda x: nn.functional.dropout(x * 2).add_(1), x)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    assert (x.grad, x.grad_fn, x._version) == (None, None, 0)


def test_a_check_that_raises_in_eager_raises() -> None:
    singular = torch.zeros(2, 2, requires_grad=True)
    compiled = aot.function(lambda x: (torch.linalg.inv(x) * 2).sum(), backend="eager", strict=True)
    compiled(leaf(2, 2))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(singular)


@pytest.mark.parametrize("number", [2, 2.5, -0.0, float("inf"), 2**60 + 1, True])
@pytest.mark.parametrize("to", [None, torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_a_tensor_that_holds_a_number_is_made_where_it_is_needed(number: Any, to: torch.dtype | None) -> None:
    """The graph holds no tensor on the host, which would be copied in each call."""

    def scaled(x: Tensor) -> Tensor:
        factor = torch.tensor(number, dtype=to) if to is None else torch.tensor(number).to(to)
        factor = factor.mul_(1) if factor.dtype is torch.float32 else factor
        return x * factor

    assert not captured(scaled, leaf(3)).gm.graph.find_nodes(op="get_attr")
    agree(scaled, plain(leaf(3)))


def test_a_tensor_of_several_numbers_stays_what_it_is() -> None:
    joint = captured(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), leaf(3))
    assert len(joint.gm.graph.find_nodes(op="get_attr")) == 1
