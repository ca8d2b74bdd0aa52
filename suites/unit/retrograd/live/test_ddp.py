"""DDP: the backward is compiled between the hooks of its reducer, which start each bucket when eager does."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import retrograd


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Noted(torch.autograd.Function):
    """The identity, whose backward writes a line."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str]) -> torch.Tensor:
        ctx.events = events
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.events.append(f"Noted {grad.sum().item()}")
        torch.autograd.Variable._execution_engine.queue_callback(lambda: ctx.events.append("callback"))
        return grad * 2, None


class Net(nn.Module):
    """Three layers, of which one may be unused, and one has a Function before it."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.events = events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Noted.apply(self.first(x).relu(), self.events)
        return self.third(self.second(x).sigmoid() + x)


Way = Callable[[], Any]


def train(
    way: Way,
    batches: int = 4,
    prepare: Callable[..., Any] = lambda *_: None,
    accumulates: bool = False,
    **options: Any,
) -> Any:
    """What `batches` steps of a wrapped `Net` show: events, gradients, and how they lie in memory."""
    events: list[str] = []
    net = Net(events)
    if not options.get("find_unused_parameters"):
        del net.unused
    model = DistributedDataParallel(net, bucket_cap_mb=0.0002, **options)

    def comm_hook(state, bucket):  # type: ignore[no-untyped-def] # torch checks annotations
        events.append(f"bucket {bucket.index()} of {bucket.buffer().numel()}")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 3)
        return future

    model.register_comm_hook(None, comm_hook)
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda grad, name=name: events.append(f"{name} arrives {grad.sum().item()}"))
        parameter.register_post_accumulate_grad_hook(
            lambda leaf, name=name: events.append(f"{name} accumulated {leaf.grad.sum().item()}")
        )
    prepare(model, net, events)
    seen = []
    for step in range(batches):
        x = torch.arange(12.0).reshape(2, 6).add(step).requires_grad_()
        x.register_hook(lambda grad: events.append(f"input {grad.sum().item()} {net.first.bias.grad}"))
        with way(), model.no_sync() if accumulates and step % 2 == 0 else nullcontext():
            model(x).square().sum().backward()
        grads = [p.grad for p in net.parameters()]
        seen.append([(None if g is None else (g.tolist(), g.stride())) for g in [x.grad, *grads]])
        if step % 2 == 1:
            net.zero_grad()
    return events, seen


def same_as_eager(**options: Any) -> None:
    expected = train(nullcontext, **options)
    context = retrograd.compiled_autograd("aten")
    assert train(lambda: context, **options) == expected
    report = context.explain()
    assert not report.fallbacks
    assert sum(backward.runs for backward in report.backwards) == 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"accumulates": True},
        {"accumulates": True, "gradient_as_bucket_view": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_buckets_start_between_the_hooks_as_in_eager(options: dict[str, bool]) -> None:
    same_as_eager(**options)


def test_hooks_that_users_put_on_nodes_come_after_the_reducer() -> None:
    def prepare(model: Any, net: Net, events: list[str]) -> None:
        node = net.third.bias.expand_as(net.third.bias).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: events.append("the user's"))

    same_as_eager(prepare=prepare)


def test_each_reducer_has_its_own_hooks() -> None:
    """Two wrapped modules in one backward, as of a generator and a discriminator."""

    def gradients() -> list[Any]:
        torch.manual_seed(0)
        first, second = (DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2))
        for _ in range(2):
            second(first(torch.ones(2, 4)).sin()).square().sum().backward()
        return [p.grad.tolist() for model in (first, second) for p in model.parameters()]

    expected = gradients()
    with retrograd.compiled_autograd("aten", strict=True):
        assert gradients() == expected


def test_a_module_that_is_copied_or_freed() -> None:
    context = retrograd.compiled_autograd("aten")
    model = DistributedDataParallel(nn.Linear(3, 3))
    with context:
        model(torch.ones(1, 3)).sum().backward()
    inner, alive = model.module, weakref.ref(model.reducer)
    copied = pickle.loads(pickle.dumps(model))
    del model
    gc.collect()
    assert alive() is None
    inner.zero_grad()
    with context:
        inner(torch.ones(1, 3)).sum().backward()
        copied(torch.ones(1, 3)).sum().backward()
    assert torch.equal(inner.weight.grad, torch.ones(3, 3))
    assert torch.equal(copied.module.weight.grad, torch.ones(3, 3))
    assert not context.explain().fallbacks


def test_a_reducer_with_a_frozen_parameter_keeps_its_hooks_in_c() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    model.module.bias.requires_grad_(False)
    with retrograd.compiled_autograd("aten") as context:
        with pytest.warns(retrograd.FallbackWarning, match="frozen or replaced after DDP wrapped"):
            model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(3, 3))
    assert [reason.code for reason in context.explain().fallbacks] == ["capture-failed"]


class Checkpointed(nn.Sequential):
    """Computes its layers again in the backward; with reentrant checkpoints, in one that is nested."""

    is_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return x


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints(is_reentrant: bool) -> None:
    def gradients() -> list[Any]:
        torch.manual_seed(0)
        net = Checkpointed(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        net.is_reentrant = is_reentrant
        model = DistributedDataParallel(net, static_graph=is_reentrant)
        for _ in range(3):
            model(torch.ones(2, 4, requires_grad=True)).square().sum().backward()
        return [p.grad.tolist() for p in net.parameters()]

    expected = gradients()
    with retrograd.compiled_autograd("aten") as context:
        assert gradients() == expected
    assert not context.explain().fallbacks


def test_a_model_that_was_wrapped_before_retrograd_was_used() -> None:
    code = """
import retrograd, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
with retrograd.compiled_autograd("eager", strict=True):
    model(torch.ones(1, 3)).sum().backward()
print(model.module.weight.grad.sum().item())
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "9.0\n"


def test_a_compiled_forward() -> None:
    def gradients(way: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        model = DistributedDataParallel(net)
        compiled = way(model)
        for _ in range(3):
            compiled(torch.ones(2, 4)).square().sum().backward()
        return [p.grad.tolist() for p in net.parameters()]

    expected = gradients(lambda model: model)
    found: list[Any] = []
    way = partial(retrograd.compile, backend="aten")
    assert gradients(lambda model: found.append(way(model)) or found[0]) == expected
    assert not retrograd.explain(found[0]).fallbacks
