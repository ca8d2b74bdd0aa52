"""Programs made of joint graphs: what they give, what they refuse, and what their signature says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from retrograd import aot
from retrograd.aot import Exported, JointGraph
from retrograd.errors import ExportError


class Model(nn.Module):
    """Parameters, buffers that change, random numbers, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(
        self, x: torch.Tensor, target: torch.Tensor, *, scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        y = self.last(nn.functional.dropout(self.norm(self.first(x)), 0.3))
        return {"y": y, "loss": (y - target).square().mean() * scale}


def leaf(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


def captured(fn: Callable[..., Any], *args: Any, dynamic: Any = None, **kwargs: Any) -> JointGraph:
    return aot.capture(aot.create_state(fn, args, kwargs, dynamic=dynamic))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


INPUTS = (torch.linspace(-1, 1, 24).reshape(6, 4), torch.linspace(0, 1, 12).reshape(6, 2))


def stepped(
    model: Model, *inputs: torch.Tensor, scale: float = 1.0
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Result, buffers afterwards, and gradients, as eager has them."""
    torch.manual_seed(5)
    model.zero_grad()
    result = model(*inputs, scale=scale)
    result["loss"].backward()
    return result, dict(model.named_buffers()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dynamic", [None, True])
def test_training_gives_results_buffers_and_gradients_to_the_bit(model: Model, dynamic: bool | None) -> None:
    program = aot.export(captured(model, *INPUTS, dynamic=dynamic, scale=2.0), kind="training")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    found = program.run(before, *INPUTS, scale=2.0)
    result, buffers, gradients = stepped(model, *INPUTS, scale=2.0)
    assert program.loss == "output['loss']"
    for ours, eager in ((found.value, result), (found.updates, buffers), (found.gradients, gradients)):
        assert ours.keys() == eager.keys()
        assert all(torch.equal(ours[name], eager[name]) for name in eager)


def test_a_program_changes_nothing_in_place(model: Model) -> None:
    program = aot.export(captured(model, *INPUTS), kind="forward")
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    found = program.run(state, *INPUTS)
    assert all(torch.equal(before[name], state[name]) for name in before)
    assert torch.equal(found.updates["norm.num_batches_tracked"], torch.tensor(1))
    assert not found.gradients


def test_other_sizes_of_a_dynamic_program(model: Model) -> None:
    program = aot.export(captured(model, *INPUTS, dynamic=True), kind="training")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fewer = [value[:5] for value in INPUTS]
    torch.manual_seed(5)
    found = program.run(state, *fewer)
    result, _, gradients = stepped(model, *fewer)
    assert torch.equal(found.value["y"], result["y"])
    assert all(torch.equal(found.gradients[name], gradients[name]) for name in gradients)


def test_joint_program_by_name() -> None:
    x, w, cotangent = leaf(2, 3), leaf(3, 4), torch.randn(2, 4)
    program = aot.export(captured(lambda x, w: (x @ w).sin(), x, w))
    found = program.call_by_name({"args[0]": x, "args[1]": w, "cotangent of output": cotangent})
    y = (x @ w).sin()
    grads = torch.autograd.grad(y, (x, w), cotangent)
    assert list(found) == ["output", "gradient of args[0]", "gradient of args[1]"]
    assert all(torch.equal(a, b) for a, b in zip(found.values(), (y, *grads), strict=True))


def several(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs above one another, and a hidden tensor at which two meet."""
    hidden = (x @ w).tanh()
    a = hidden.exp()
    return a, a.sum(), (hidden * a).sum()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("loss", [1, 2])
def test_training_through_several_regions(loss: int, dynamic: bool | None) -> None:
    x, w = leaf(5, 3), leaf(3, 3)
    program = aot.export(captured(several, x, w, dynamic=dynamic), kind="training", loss=f"output[{loss}]")
    found = program.run({}, x, w)
    expected = torch.autograd.grad(several(x, w)[loss], (x, w))
    assert [torch.equal(found.gradients[f"args[{i}]"], expected[i]) for i in range(2)] == [True, True]


@pytest.mark.parametrize("dynamic", [None, True])
def test_in_a_single_region_zeros_flow_into_other_outputs(dynamic: bool | None) -> None:
    x, w = leaf(5, 3), leaf(3, 3)
    joint = aot.capture(aot.create_state(several, (x, w), dynamic=dynamic), single_region=True)
    found = aot.export(joint, kind="training", loss="output[1]").run({}, x, w)
    expected = torch.autograd.grad(several(x, w)[1], (x, w))
    assert [torch.equal(found.gradients[f"args[{i}]"], expected[i]) for i in range(2)] == [True, True]


def test_what_the_loss_does_not_reach_has_no_gradient() -> None:
    joint = captured(lambda x, w: ((x * 2).sum(), (w * 3).sum()), leaf(3), leaf(3))
    assert list(aot.export(joint, kind="training", loss="output[1]").run({}, leaf(3), leaf(3)).gradients) == [
        "args[1]"
    ]


def test_signature_is_readable(model: Model) -> None:
    joint = captured(model, *INPUTS, dynamic={9: frozenset({0}), 10: frozenset({0})})
    assert_expected_inline(
        str(aot.export(joint, kind="training").signature),
        """\
inputs
  first.weight: float32[8, 4] on cpu
  first.bias: float32[8] on cpu
  norm.weight: float32[8] on cpu
  norm.bias: float32[8] on cpu
  last.weight: float32[2, 8] on cpu
  last.bias: float32[2] on cpu
  norm.running_mean: float32[8] on cpu
  norm.running_var: float32[8] on cpu
  norm.num_batches_tracked: int64[] on cpu
  args[0]: float32[d0, 4] on cpu
  args[1]: float32[d0, 2] on cpu
outputs
  new value of norm.running_mean
  new value of norm.running_var
  new value of norm.num_batches_tracked
  output['y']
  output['loss']
  gradient of last.bias
  gradient of last.weight
  gradient of norm.weight
  gradient of norm.bias
  gradient of first.bias
  gradient of first.weight""",
    )


def test_an_input_that_is_returned_is_returned() -> None:
    x = leaf(3)
    program = aot.export(captured(lambda x: (x, x * 2, "text", 3), x), kind="forward")
    value = program.run({}, x).value
    assert value[0] is x
    assert value[2:] == ("text", 3)


def test_a_buffer_that_is_changed_and_returned_is_returned_new() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.seen += x.detach().sum()
            return self.seen, x * self.seen

    program = aot.export(captured(Counts(), torch.ones(3)), kind="forward")
    found = program.run({"seen": torch.tensor(2.0)}, torch.ones(3))
    assert found.value[0].item() == found.updates["seen"].item() == 5.0
    assert torch.equal(found.value[1], torch.full((3,), 5.0))


def test_a_tensor_found_in_a_closure_is_kept_by_value() -> None:
    table = torch.arange(6.0).reshape(3, 2)
    program = aot.export(captured(lambda x: (x @ table).sum(), leaf(2, 3)), kind="training")
    x = leaf(2, 3)
    found = program.run({}, x)
    assert [one.name for one in program.signature.inputs] == ["args[0]"]
    assert torch.equal(found.gradients["args[0]"], torch.autograd.grad((x @ table).sum(), x)[0])


def test_other_strides_than_at_capture_are_laid_out() -> None:
    program = aot.export(captured(lambda x: x.contiguous().view(-1) * 2, leaf(3, 4)), kind="forward")
    x = leaf(4, 3).t()
    assert torch.equal(program.run({}, x).value, x.reshape(-1) * 2)


# what is refused ----------------------------------------------------------------------------------


def changes_an_argument(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def reshapes_an_argument(x: torch.Tensor) -> torch.Tensor:
    x.t_()
    return x * 2


WEIGHT = nn.Parameter(torch.ones(3))


class Odd:
    """Something that is no tensor."""


@pytest.mark.parametrize(
    ("fn", "inputs", "text"),
    [
        (changes_an_argument, (torch.ones(3),), r"argument args\[0\] is changed in place; .*buffers"),
        (reshapes_an_argument, (torch.ones(2, 3),), r"args\[0\] gets another shape in place"),
        (
            lambda x: x.view(-1),
            (leaf(2, 3),),
            r"output 0 is a view of input args\[0\](.|\n)*return a clone of it",
        ),
        (lambda x: (lambda y: (y, y.t()))(x * 2), (leaf(2, 3),), r"output 1 is a view of value 0"),
        (lambda x: x * WEIGHT, (leaf(3),), r"uses a tensor that requires grad and is not given to it"),
        (lambda x: (x * 2, Odd), (leaf(3),), r"output 1 is type <class .*Odd'>"),
        (lambda x, odd: x * 2, (leaf(3), Odd()), r"args\[1\] is Odd"),
    ],
)
def test_what_a_program_cannot_hold_is_refused(fn: Any, inputs: Any, text: str) -> None:
    joint = captured(fn, *inputs)
    with pytest.raises(ExportError, match=text) as caught:
        aot.export(joint)
    assert caught.value.reason.stage == "aot.export"
    assert caught.value.reason.way_out


def test_a_call_without_a_schema_is_refused() -> None:
    def inserts(gm: Any, example_inputs: Any) -> Any:
        node = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[0]
        node.target = torch.sin
        return gm

    joint = captured(lambda x: x.sin(), leaf(3)).apply(inserts)
    with pytest.raises(
        ExportError, match=r"the graph holds sin, a function without a schema(.|\n)*node  sin"
    ):
        aot.export(joint)


@pytest.mark.parametrize(
    ("fn", "loss", "text"),
    [
        (lambda x: x * 2, None, "0 outputs could be the loss of <lambda>; there are: none"),
        (lambda x: (x.sum(), x.mean()), None, r"2 outputs could be the loss of .*: output\[0\], output\[1\]"),
        (lambda x: (x.sum(), x * 2), "output[1]", r"'output\[1\]' is no differentiable scalar output"),
        (lambda x: x.detach().sum(), None, "0 outputs could be the loss"),
    ],
)
def test_a_training_program_needs_one_loss(fn: Any, loss: str | None, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        aot.export(captured(fn, leaf(3)), kind="training", loss=loss)


# calls that do not fit ----------------------------------------------------------------------------


def scaled() -> Exported:
    def fn(x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        assert x.shape[0] > 3
        return x * options["scale"]

    inputs = (torch.ones(5, 3), {"scale": 2.0})
    return aot.export(captured(fn, *inputs, dynamic=True), kind="forward")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            (torch.ones(5, 3, dtype=torch.float64), {"scale": 2.0}),
            r"input args\[0\] is torch.float64 on cpu, and was",
        ),
        ((torch.ones(5), {"scale": 2.0}), r"input args\[0\] has 1 dimensions, and had 2 at capture"),
        (
            (torch.ones(5, 1), {"scale": 2.0}),
            r"input args\[0\] has a size 1, and the capture is for sizes from 2 to any",
        ),
        (
            (torch.ones(3, 3), {"scale": 2.0}),
            r"input args\[0\] has a size 3, and the capture is for sizes from 4 to any",
        ),
        (
            (torch.ones(5, 3), {"scale": 3.0}),
            r"args\[1\]\['scale'\] is 3.0, and was the constant 2.0 at capture",
        ),
        ((torch.ones(5, 3), {"size": 2.0}), r"the arguments are built as "),
        (([1.0], {"scale": 2.0}), r"the arguments are built as "),
        (("x", {"scale": 2.0}), r"input args\[0\] is a str, not a tensor"),
    ],
)
def test_inputs_that_do_not_fit_are_named(args: Any, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        scaled().run({}, *args)


def test_sizes_that_break_a_guard_are_refused() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() * 2 if x.shape[0] > y.shape[0] else y.sum()

    program = aot.export(captured(fn, torch.ones(5), torch.ones(4), dynamic=True), kind="forward")
    assert program.run({}, torch.ones(9), torch.ones(4)).value.item() == 18.0
    with pytest.raises(ExportError, match="do not satisfy"):
        program.run({}, torch.ones(5), torch.ones(6))


def test_wrong_arity_and_names(model: Model) -> None:
    program = aot.export(captured(model, *INPUTS), kind="forward")
    with pytest.raises(ExportError, match="2 inputs where the program takes 11"):
        program(*INPUTS)
    with pytest.raises(ExportError, match=r"input first\.weight is missing"):
        program.call_by_name({})
    with pytest.raises(ExportError, match=r"first\.weight is not in the state"):
        program.run({}, *INPUTS)
    with pytest.raises(ExportError, match="a joint program takes cotangents"):
        aot.export(program.joint).run(model.state_dict(), *INPUTS)


def test_one_tensor_given_twice_stays_one() -> None:
    x = leaf(3)
    program = aot.export(captured(lambda x, y: (x * y).sum(), x, x), kind="training")
    assert torch.equal(program.run({}, x, x).gradients["args[0]"], 2 * x)
    with pytest.raises(ExportError, match=r"args\[1\] and args\[0\] were one tensor at capture, and are two"):
        program.run({}, x, leaf(3))
