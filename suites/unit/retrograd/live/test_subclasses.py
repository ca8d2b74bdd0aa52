"""Tensor subclasses that wrap others: their segments are interpreted, with a reason, and as eager has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import retrograd
from retrograd._torch.trace.fakes import why_not_fakeable
from unit.retrograd.programs import Unit


def two(*shape: int) -> TwoTensor:
    """A leaf that is a TwoTensor."""
    return TwoTensor(torch.randn(*shape), torch.randn(*shape)).requires_grad_()


def step(context: contextlib.AbstractContextManager[object], x: torch.Tensor) -> torch.Tensor:
    """The gradient of one small program."""
    x.grad = None
    root = (x.sin() * x).sum()
    with context:
        root.backward()
    assert x.grad is not None
    return x.grad


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside a subclass tensor, at any depth."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for value in inner if isinstance(value, torch.Tensor) for part in parts(value)]


def assert_as_eager(context: retrograd.CompiledAutograd, x: torch.Tensor) -> torch.Tensor:
    """One step inside `context` and one outside, with equal results; the gradient."""
    ours, eager = step(context, x), step(contextlib.nullcontext(), x)
    assert type(ours) is type(eager)
    assert (ours.shape, ours.stride(), ours.dtype) == (eager.shape, eager.stride(), eager.dtype)
    torch.testing.assert_close(parts(ours), parts(eager))
    return ours


@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("depth", [1, 2])
def test_two_tensors_are_interpreted_and_that_is_told_once(backend: str, depth: int) -> None:
    context = retrograd.compiled_autograd(backend)
    for _ in range(3):
        x = two(2, 3) if depth == 1 else TwoTensor(two(2, 3), two(2, 3)).detach().requires_grad_()
        assert len(parts(assert_as_eager(context, x))) == 2 * depth
    (lowering,) = context.explain().backwards[0].lowerings
    assert lowering.how == "interpreted"
    assert lowering.because == "TwoTensor, a tensor subclass that wraps others, is among its values"
    assert not context.explain().fallbacks


def test_strict_refuses_them() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    for _ in range(2):
        with pytest.raises(retrograd.LoweringError, match="TwoTensor, a tensor subclass that wraps others"):
            step(context, two(3))


def test_metadata_is_what_it_is_now() -> None:
    context = retrograd.compiled_autograd("aten")
    for meta in (2, 2.0, True, 2, 2.0):
        assert assert_as_eager(context, Unit(torch.ones(3), meta).requires_grad_()).meta is meta


def test_an_attribute_outside_the_protocol() -> None:
    context = retrograd.compiled_autograd("aten")
    for note in ("a", "b", "a"):
        x = Unit(torch.ones(3)).requires_grad_()
        x.note = note
        assert_as_eager(context, x)


def test_metadata_that_changes_in_place() -> None:
    context = retrograd.compiled_autograd("aten")
    meta = {"scale": 1}
    x = Unit(torch.ones(3), meta).requires_grad_()
    assert_as_eager(context, x)
    meta["scale"] = 2
    assert assert_as_eager(context, x).meta == {"scale": 2}


@pytest.mark.parametrize("meta", [object(), iter([])], ids=["incomparable", "not to be copied"])
def test_metadata_that_cannot_be_compared_or_copied(meta: object) -> None:
    assert_as_eager(retrograd.compiled_autograd("aten"), Unit(torch.ones(3), meta).requires_grad_())


def test_what_is_inside_counts() -> None:
    assert why_not_fakeable(TwoTensor(two(3).detach(), Unit(torch.ones(3)))) is None
    assert why_not_fakeable(Unit(torch.ones(3).to_sparse())) == "torch.sparse_coo tensor"


def test_sizes_that_change() -> None:
    context = retrograd.compiled_autograd("aten")
    for rows in (4, 5, 6, 7, 9):
        assert_as_eager(context, two(rows, 3))


def test_sizes_in_metadata() -> None:
    context = retrograd.compiled_autograd("aten")
    for rows in (4, 5, 6, 5):
        assert assert_as_eager(context, Unit(torch.ones(rows, 2), (rows, 2)).requires_grad_()).meta == (
            rows,
            2,
        )


def test_a_plain_tensor_after_a_subclass_and_back_is_compiled() -> None:
    context = retrograd.compiled_autograd("aten")
    for x in (two(3), torch.randn(3, requires_grad=True), two(3), torch.randn(3, requires_grad=True)):
        assert_as_eager(context, x)
    hows = [low.how for backward in context.explain().backwards for low in backward.lowerings]
    assert (hows.count("aten"), hows.count("interpreted"), retrograd.counters["lowerings"]) == (1, 1, 1)


def test_fake_tensors_are_interpreted() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(3, requires_grad=True)
    with retrograd.compiled_autograd("aten") as context:
        (x.sin() * x).sum().backward()
    assert isinstance(x.grad, torch._subclasses.FakeTensor)
    (lowering,) = context.explain().backwards[0].lowerings
    assert lowering.because == "tensor subclass FakeTensor"


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    """One rank of gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["eager", "aten", "inductor"])
def test_dtensors(mesh: dist.DeviceMesh, backend: str) -> None:
    context = retrograd.compiled_autograd(backend)
    weight = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    for placement in (Replicate(), Shard(0), Replicate()):
        grads = []
        for around in (context, contextlib.nullcontext()):
            weight.grad = None
            x = distribute_tensor(torch.ones(2, 4), mesh, [placement])
            root = (x @ weight).tanh().sum()
            with around:
                root.backward()
            grads.append(weight.grad)
        ours, eager = grads
        assert isinstance(ours, DTensor)
        assert (ours.placements, ours.shape) == (eager.placements, eager.shape)
        torch.testing.assert_close(ours.to_local(), eager.to_local())
    hows = {low.how for backward in context.explain().backwards for low in backward.lowerings}
    assert hows == (set() if backend == "eager" else {"interpreted"})
