"""The first stage: leaves, names, fakes and sharing, before anything is traced."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from retrograd import CaptureError, aot
from retrograd.graph.joint_graph import CaptureState
from unit.retrograd.aot.against_eager import leaf, tensor


def state_of(*args: Any, **options: Any) -> CaptureState:
    return aot.create_state(lambda *args, **kwargs: args[0], args, **options)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("missing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)) + self.steps


def test_leaves_of_a_function() -> None:
    state = state_of(leaf(2), {"b": tensor(3), "n": 4}, kwargs={"k": None})
    assert [(leaf.name, leaf.requires_grad, leaf.is_tensor) for leaf in state.leaves] == [
        ("args[0]", True, True),
        ("args[1]['b']", False, True),
        ("args[1]['n']", False, False),
        ("k", False, False),
    ]


def test_leaves_of_a_module_come_first_and_tied_ones_once() -> None:
    state = aot.create_state(Tied(), (torch.tensor([1, 2]),))
    assert state.name == "Tied"
    assert [(leaf.name, leaf.kind.value) for leaf in state.leaves if leaf.kind] == [
        ("table.weight", "parameter"),
        ("steps", "buffer"),
        ("args[0]", "argument"),
    ]


def test_tensors_are_fake_and_look_like_those_given() -> None:
    given = [leaf(2, 3), tensor(4, 6)[:, ::2], torch.arange(3, dtype=torch.int8)]
    state = state_of(*given)
    assert all(isinstance(made.value, FakeTensor) for made in state.leaves)
    assert [
        (made.value.shape, made.value.stride(), made.value.dtype, made.value.device) for made in state.leaves
    ] == [(value.shape, value.stride(), value.dtype, value.device) for value in given]


def test_history_is_noted_and_not_kept() -> None:
    x = leaf(2)
    state = state_of(x, x * 2, x.detach())
    assert [(made.requires_grad, made.is_leaf) for made in state.leaves] == [
        (True, True),
        (True, False),
        (False, True),
    ]
    assert all(made.value.grad_fn is None for made in state.leaves)


def test_one_tensor_given_twice() -> None:
    x, y = leaf(2), leaf(2)
    assert [made.same_as for made in state_of(x, y, x, x).leaves] == [None, None, 0, 0]


def test_tensors_that_share_memory_are_a_group() -> None:
    x = tensor(2, 3)
    (group,) = state_of(x, tensor(2), x[1]).aliases
    assert [(m.leaf, m.size, m.stride, m.offset, m.is_base) for m in group.members] == [
        (0, (2, 3), (3, 1), 0, True),
        (2, (3,), (1,), 3, False),
    ]
    assert group.base is not None
    assert tuple(group.base.value.shape) == (2, 3)
    assert not state_of(tensor(2), tensor(2)).aliases


def test_sizes_are_symbolic_where_asked() -> None:
    def symbolic(state: CaptureState) -> list[list[bool]]:
        return [[isinstance(size, torch.SymInt) for size in made.value.shape] for made in state.leaves]

    inputs = tensor(3, 4), tensor(5)
    assert symbolic(state_of(*inputs)) == [[False, False], [False]]
    assert symbolic(state_of(*inputs, dynamic=False)) == [[False, False], [False]]
    assert symbolic(state_of(*inputs, dynamic=True)) == [[True, True], [True]]
    assert symbolic(state_of(*inputs, dynamic={0: frozenset({1})})) == [[False, True], [False]]
    assert symbolic(state_of(tensor(1, 4), dynamic=True)) == [[False, True]]


def test_the_modes_of_the_call_are_kept() -> None:
    assert state_of(leaf(2)).thread_modes.grad
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = state_of(leaf(2)).thread_modes
    assert not ambient.grad
    assert ambient.autocast == (("cpu", torch.bfloat16),)


def test_a_callers_fake_mode_is_used_as_it_is() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(tensor(3, 4))
    state = state_of(fake, fake_mode=mode)
    assert state.fake_mode is mode
    assert state.leaves[0].value.fake_mode is mode
    assert tuple(state.leaves[0].value.shape) == tuple(fake.shape)


def test_a_state_is_frozen() -> None:
    state = state_of(leaf(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.name = "other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.leaves[0].requires_grad = False  # type: ignore[misc]


def test_making_a_state_does_not_touch_the_inputs() -> None:
    model = Tied()
    before = dict(model.named_parameters(remove_duplicate=False))
    x = leaf(2)
    aot.create_state(model, (torch.tensor([1]),))
    state_of(x)
    assert dict(model.named_parameters(remove_duplicate=False)) == before
    assert (x._version, x.grad) == (0, None)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("depth", [0, 1], ids=["root", "child"])
def test_a_module_with_hooks_is_refused(kind: str, depth: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    hooked = [model, model[1]][depth]
    handle = getattr(hooked, f"register_{kind}_hook")(lambda *_: None)
    with pytest.raises(CaptureError, match="has hooks") as caught:
        aot.create_state(model, (torch.ones(2),))
    assert caught.value.reason.code == "module-hooks"
    handle.remove()
    assert aot.create_state(model, (torch.ones(2),)).leaves
