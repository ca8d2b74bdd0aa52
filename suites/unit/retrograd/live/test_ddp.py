"""DDP: the backward is compiled between the hooks of its reducer, which start each bucket when eager does."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import warnings
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


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "after the first step"])
def test_hooks_that_users_put_on_nodes_keep_their_place(when: str) -> None:
    """Which of Python's hooks come before the reducer's shows only in what they do."""

    def events(way: Way) -> list[str]:
        net = nn.Linear(4, 4)
        seen: list[str] = []
        nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in net.parameters()]  # type: ignore[union-attr]

        def add_hooks() -> None:
            for node in nodes:
                node.register_hook(lambda *_: seen.append("the user's"))

        def comm_hook(state, bucket):  # type: ignore[no-untyped-def] # torch checks annotations
            seen.append("bucket")
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        if when == "before wrapping":
            add_hooks()
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, comm_hook)
        if when == "after wrapping":
            add_hooks()
        for _ in range(2):
            with way():
                model(torch.ones(1, 4)).sum().backward()
            if when == "after the first step" and len(seen) == 1:
                add_hooks()
        return seen

    expected = events(nullcontext)
    context = retrograd.compiled_autograd("aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", retrograd.FallbackWarning)  # see the end
        assert events(lambda: context) == expected
    assert bool(context.explain().fallbacks) == (when != "after the first step")


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


def test_one_reducer_is_found_before_the_other() -> None:
    """A discriminator first learns alone, then in one backward with the generator."""

    def gradients() -> list[Any]:
        torch.manual_seed(0)
        first, second = (DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2))
        for _ in range(2):
            second(first(torch.ones(2, 4)).detach()).square().sum().backward()
            second(first(torch.ones(2, 4))).square().sum().backward()
        return [p.grad.tolist() for model in (first, second) for p in model.parameters()]

    expected = gradients()
    with retrograd.compiled_autograd("aten", strict=True):
        assert gradients() == expected


def test_a_module_that_is_wrapped_again() -> None:
    net = nn.Linear(3, 3)
    with retrograd.compiled_autograd("aten", strict=True):
        for _ in range(3):
            model = DistributedDataParallel(net)
            model(torch.ones(1, 3)).sum().backward()
            del model
            gc.collect()
    assert torch.equal(net.weight.grad, torch.full((3, 3), 3.0))


def test_two_reducers_of_one_parameter_keep_their_order() -> None:
    def gradients(way: Way) -> list[Any]:
        torch.manual_seed(0)
        net, models = nn.Linear(4, 4), []
        for factor in (2, 5):

            def comm_hook(state, bucket, factor=factor):  # type: ignore[no-untyped-def]
                future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                future.set_result(bucket.buffer() * factor)
                return future

            models.append(DistributedDataParallel(net))
            models[-1].register_comm_hook(None, comm_hook)
            gc.collect()  # now the garbage collector lists the second one first
            gc.collect()
        first, second = models
        with way():
            (first(torch.ones(1, 4)).sum() + second(torch.ones(1, 4)).sum()).backward()
        return [p.grad.tolist() for p in net.parameters()]

    expected = gradients(nullcontext)
    with pytest.warns(retrograd.FallbackWarning, match="keeps its C\\+\\+ hooks"):
        assert gradients(lambda: retrograd.compiled_autograd("aten")) == expected


@pytest.mark.parametrize("options", [{"device_ids": [0]}, {"param_to_hook_all_reduce": nn.Parameter()}])
def test_a_module_that_could_not_be_wrapped_at_first(options: dict[str, Any]) -> None:
    net = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"device_ids|at the same time") as kept:
        DistributedDataParallel(net, **options)
    model = DistributedDataParallel(net)
    with retrograd.compiled_autograd("aten", strict=True):
        model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(net.weight.grad, torch.ones(3, 3))
    del kept  # its frames hold the first one


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
        with pytest.warns(retrograd.FallbackWarning, match="keeps its C\\+\\+ hooks"):
            model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(3, 3))
    assert [reason.code for reason in context.explain().fallbacks] == ["capture-failed"]


def test_as_many_parameters_require_grad_as_before_but_others() -> None:
    def gradients(way: Way) -> list[Any]:
        torch.manual_seed(0)
        first, second, third = (nn.Linear(3, 3) for _ in range(3))
        first.requires_grad_(False)
        model = DistributedDataParallel(nn.Sequential(first, second, third), find_unused_parameters=True)
        first.requires_grad_(True)
        second.requires_grad_(False)
        for _ in range(2):
            with way():
                model(torch.ones(1, 3)).square().sum().backward()
        return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]

    expected = gradients(nullcontext)
    with pytest.warns(retrograd.FallbackWarning, match="keeps its C\\+\\+ hooks"):
        assert gradients(lambda: retrograd.compiled_autograd("aten")) == expected


def test_a_module_of_which_a_part_is_frozen_when_it_is_wrapped() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    with retrograd.compiled_autograd("aten", strict=True):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(net[1].bias.grad, torch.full((3,), 2.0))


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
