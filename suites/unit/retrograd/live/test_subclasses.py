"""Tensor subclasses: taken apart at the border of a segment, compiled, guarded, and put together again."""

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
from retrograd.trace.fakes import why_not_fakeable
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
def test_two_tensors_are_compiled(backend: str, depth: int) -> None:
    context = retrograd.compiled_autograd(backend, strict=True)
    for _ in range(2):
        x = two(2, 3) if depth == 1 else TwoTensor(two(2, 3), two(2, 3)).detach().requires_grad_()
        assert len(parts(assert_as_eager(context, x))) == 2 * depth
    (lowering,) = context.explain().backwards[0].lowerings
    assert lowering.how == backend
    assert "subclass tensors (TwoTensor): class, metadata" in lowering.guards


def test_the_graph_that_a_backend_gets_has_only_plain_tensors() -> None:
    seen: list[type] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[object]) -> object:
        seen.extend(type(i) for i in inputs)
        return gm.forward

    assert_as_eager(retrograd.compiled_autograd(backend, strict=True), two(3))
    assert seen == [torch._subclasses.FakeTensor] * len(seen)


def test_metadata_is_a_guard() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    for meta in (2, 2.0, True, 2, 2.0):
        assert assert_as_eager(context, Unit(torch.ones(3), meta).requires_grad_()).meta is meta
    assert retrograd.counters["lowerings"] == 3
    assert context.explain().recompiles[0].because.startswith("another class or metadata")


def test_an_attribute_outside_the_protocol_is_a_guard() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    for note in ("a", "b", "a"):
        x = Unit(torch.ones(3)).requires_grad_()
        x.note = note
        assert_as_eager(context, x)
    assert retrograd.counters["lowerings"] == 2


def test_mutable_metadata_is_compared_as_it_was_and_not_shared() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    meta = {"scale": 1}
    x = Unit(torch.ones(3), meta).requires_grad_()
    first = assert_as_eager(context, x)
    meta["scale"] = 2
    assert assert_as_eager(context, x).meta == {"scale": 2}
    assert retrograd.counters["lowerings"] == 2
    one, other = step(context, x), step(context, x)
    assert one.meta is not other.meta
    assert first is not one


@pytest.mark.parametrize("meta", [object(), iter([])], ids=["incomparable", "not to be copied"])
def test_metadata_that_no_guard_can_hold_is_interpreted_with_a_reason(meta: object) -> None:
    context = retrograd.compiled_autograd("aten")
    assert_as_eager(context, Unit(torch.ones(3), meta).requires_grad_())
    (lowering,) = context.explain().backwards[0].lowerings
    assert lowering.how == "interpreted"
    assert lowering.because.startswith("the context of Unit")


def test_what_is_inside_counts() -> None:
    assert why_not_fakeable(TwoTensor(two(3).detach(), Unit(torch.ones(3)))) is None
    assert why_not_fakeable(Unit(torch.ones(3).to_sparse())) == "torch.sparse_coo tensor"


def test_changing_sizes_settle() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    for rows in (4, 5, 6, 7, 9):
        assert_as_eager(context, two(rows, 3))
    assert retrograd.counters["lowerings"] == 2


def test_sizes_in_metadata_are_lowered_one_by_one() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    for rows in (4, 5, 6, 5):
        assert assert_as_eager(context, Unit(torch.ones(rows, 2), (rows, 2)).requires_grad_()).meta == (
            rows,
            2,
        )
    assert retrograd.counters["lowerings"] == 3


def test_a_plain_tensor_after_a_subclass_and_back() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    for x in (two(3), torch.randn(3, requires_grad=True), two(3), torch.randn(3, requires_grad=True)):
        assert_as_eager(context, x)
    assert retrograd.counters["lowerings"] == 2


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
    context = retrograd.compiled_autograd(backend, strict=True)
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
    assert hows == (set() if backend == "eager" else {backend})
