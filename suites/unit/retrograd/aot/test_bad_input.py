"""Bad input: one clear error each, which names the stage, the node or role, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import retrograd
from retrograd import aot
from retrograd.errors import CaptureError, OptionError, PassError, RetrogradError, VerificationError
from unit.retrograd.aot.against_eager import captured, leaf, tensor

quiet = pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")


def identity(x: Any, *rest: Any, **more: Any) -> Any:
    return x


def fake(*sizes: int) -> Tensor:
    return FakeTensorMode(shape_env=ShapeEnv()).from_tensor(tensor(*sizes))


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


#: what is given to `create_state`, then code, node and words of the error
STATES: dict[str, tuple[Callable[[], aot.JointGraph], str, str, str]] = {
    "a fake tensor given as real": (lambda: captured(identity, fake(2)), "fake-input", "args[0]", "is fake"),
    "a fake tensor inside a list": (
        lambda: captured(identity, tensor(2), [tensor(1), fake(2)]),
        "fake-input",
        "args[1][1]",
        "is fake",
    ),
    "a real tensor given as fake": (
        lambda: captured(identity, tensor(2), fake_mode=FakeTensorMode()),
        "real-input",
        "args[0]",
        "is real",
    ),
    "a fake tensor of another mode": (
        lambda: captured(identity, fake(2), fake_mode=FakeTensorMode()),
        "fake-input",
        "args[0]",
        "given fake mode",
    ),
    "a sparse tensor": (
        lambda: captured(identity, torch.eye(2).to_sparse()),
        "input",
        "args[0]",
        "torch.sparse_coo tensor",
    ),
    "a parameter that is not initialised": (
        lambda: captured(lazy(), tensor(2, 4)),
        "lazy-state",
        "weight",
        "not initialised",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name: str) -> None:
    make, code, node, words = STATES[name]
    with pytest.raises(CaptureError) as raised:
        make()
    reason = raised.value.reason
    assert (reason.code, reason.stage, reason.node) == (code, "aot.create_state", node)
    assert words in reason.text
    assert all(part in str(raised.value) for part in ("stage  aot.create_state", f"node  {node}", "try    "))


@quiet
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(lambda: (torch.eye(2).to_sparse(),), id="sparse"),
    ],
)
def test_a_function_runs_them_eagerly(args: Callable[[], tuple[Any, ...]]) -> None:
    given = args()
    assert aot.function(identity, backend="eager")(*given) is given[0]
    *_, reason = retrograd.explain().fallbacks
    assert reason.stage == "aot.create_state"


# Arguments


def scaled(x: Tensor, by: Tensor, *, plus: float = 0.0) -> Tensor:
    return x * by + plus


WRONG_CALLS = {
    "one argument too few": ((tensor(2),), {}),
    "one argument too many": ((tensor(2), tensor(2), tensor(2)), {}),
    "an unknown keyword": ((tensor(2), tensor(2)), {"minus": 1.0}),
    "an argument twice": ((tensor(2), tensor(2)), {"by": tensor(2)}),
}


@quiet
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_arguments_that_the_function_does_not_take_raise_what_eager_raises(name: str) -> None:
    args, kwargs = WRONG_CALLS[name]
    with pytest.raises(TypeError) as expected:
        scaled(*args, **kwargs)
    with pytest.raises(TypeError) as raised:
        aot.function(scaled, backend="eager")(*args, **kwargs)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_arguments_that_the_function_does_not_take_name_the_stage(name: str) -> None:
    args, kwargs = WRONG_CALLS[name]
    with pytest.raises(CaptureError) as raised:
        captured(scaled, *args, kwargs=kwargs)
    assert raised.value.reason.stage == "aot.capture"
    assert "scaled()" in raised.value.reason.text
    assert isinstance(raised.value.__cause__, TypeError)


@pytest.mark.parametrize("count", [1, 3])
def test_a_compiled_partition_takes_as_many_inputs_as_were_captured(count: int) -> None:
    call = aot.compile(aot.partition(captured(scaled, tensor(2), tensor(2))), "eager")
    with pytest.raises(RetrogradError) as raised:
        call.flat([tensor(2)] * count)
    assert "2" in str(raised.value)
    assert str(count) in str(raised.value)
    assert "try    " in str(raised.value)


def test_a_compiled_partition_refuses_what_is_no_list_of_inputs() -> None:
    call = aot.compile(aot.partition(captured(torch.sin, tensor(1))), "eager")
    with pytest.raises(RetrogradError, match="list"):
        call.flat(tensor(1))


def test_a_compiled_partition_refuses_a_tensor_that_begins_elsewhere_if_that_is_read() -> None:
    memory = tensor(6)
    joint = captured(lambda x: x.as_strided((2,), (1,), 1) * 2, memory[1:4])
    call = aot.compile(aot.partition(joint), "eager")
    with pytest.raises(retrograd.CallError, match="began at 1 in its memory at capture, and begins at 2"):
        call.flat([memory[2:5]])
    assert torch.equal(call.flat([memory[1:4]]), memory[1:3] * 2)
    with pytest.raises(retrograd.CallError, match="began at 1"):
        call.flat([memory[2:5]])


def test_a_compiled_partition_compares_arrays_by_their_values() -> None:
    x, factors = tensor(2), np.arange(3.0)
    joint = captured(lambda x, factors: x * float(factors.sum()), x, factors)
    call = aot.compile(aot.partition(joint), "eager")
    for _ in range(2):
        assert torch.equal(call.flat([x, np.arange(3.0)]), x * 3)
    factors[0] = 4
    with pytest.raises(retrograd.CallError, match="capture"):
        call.flat([x, np.arange(3.0) + 1])


# Passes


def swaps_forward_and_gradient(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    output = gm.graph.output_node()
    first, second = output.args[0]  # type: ignore[misc]
    output.args = ((second, first),)
    return gm


def drops_a_gradient(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    output = gm.graph.output_node()
    output.args = (tuple(output.args[0])[:-1],)  # type: ignore[arg-type]
    return gm


def drops_a_placeholder(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    *_, last = gm.graph.find_nodes(op="placeholder")
    last.replace_all_uses_with(next(iter(gm.graph.nodes)))
    gm.graph.erase_node(last)
    return gm


def writes_into_a_value(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    (node, *_) = [n for n in gm.graph.nodes if n.op == "call_function"]
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.ops.aten.add_.Tensor, (node, 1))
    return gm


def changes_a_type(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    output = gm.graph.output_node()
    first, *rest = output.args[0]  # type: ignore[misc]
    with gm.graph.inserting_before(output):
        double = gm.graph.call_function(torch.ops.aten._to_copy.default, (first,), {"dtype": torch.float64})
    double.meta["val"] = first.meta["val"].double()
    output.args = ((double, *rest),)
    return gm


def returns_nothing(gm: fx.GraphModule, example_inputs: Any) -> None:
    gm.graph.eliminate_dead_code()


def raises(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    raise LookupError("mine")


PASSES: dict[str, tuple[Any, type[RetrogradError], str]] = {
    "a forward output that depends on a cotangent": (
        swaps_forward_and_gradient,
        VerificationError,
        "output 0",
    ),
    "a gradient is lost": (drops_a_gradient, VerificationError, "gradient of primal 0"),
    "a placeholder is lost": (drops_a_placeholder, VerificationError, "cotangent of boundary 0"),
    "an effect is added": (writes_into_a_value, VerificationError, "add_"),
    "an output of another type": (changes_a_type, VerificationError, "output 0"),
    "no graph is returned": (returns_nothing, PassError, "returns_nothing"),
    "the pass raises": (raises, PassError, "mine"),
}


@pytest.mark.parametrize("name", PASSES)
def test_passes_that_break_the_law(name: str) -> None:
    change, kind, words = PASSES[name]
    joint = captured(lambda x: x.sin(), leaf(3))
    before = joint.gm.code
    with pytest.raises(kind) as raised:
        joint.apply(change)
    text = str(raised.value)
    assert words in text
    assert change.__name__ in text
    assert "stage  aot.apply" in text
    assert "try    " in text
    assert joint.gm.code == before


@quiet
@pytest.mark.parametrize("name", PASSES)
def test_a_function_with_such_a_pass_runs_eagerly_or_raises(name: str) -> None:
    change, kind, _ = PASSES[name]
    x = leaf(3)
    assert torch.equal(aot.function(torch.sin, backend="eager", passes=[change])(x), x.sin())
    with pytest.raises(kind):
        aot.function(torch.sin, backend="eager", passes=[change], strict=True)(x)


def test_what_is_no_module() -> None:
    with pytest.raises(OptionError, match=r"got function\n  expected  a torch\.nn\.Module"):
        aot.module(scaled)  # type: ignore[arg-type]


def test_two_tensors_where_one_was_captured_are_refused() -> None:
    x, y = tensor(3), tensor(3) * 2
    call = aot.compile(aot.partition(captured(lambda x, y: x * y, x, x)), "eager")
    with pytest.raises(
        retrograd.CallError, match=r"args\[0\] and args\[1\] were one tensor at capture, and are"
    ):
        call.flat([x, y])
    assert torch.equal(call.flat([y, y]), y * y)
    with pytest.raises(retrograd.CallError):
        call.flat([x, y])
