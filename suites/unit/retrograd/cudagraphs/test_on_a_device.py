"""Recordings on a GPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import retrograd
from retrograd import aot
from retrograd.cudagraphs import graphed_function, results
from retrograd.cudagraphs.graphed_call import WARM_UPS, GraphedCall, Values
from retrograd.runtime.streams import side_streams

pytestmark = pytest.mark.gpu


def call_of(fn, **values):
    told = []
    device = torch.device("cuda", torch.cuda.current_device())
    tell = functools.cache(told.append)
    kept = {place: place for place in values.pop("kept", ())}
    return GraphedCall(fn, graphed_function._program, device, Values(kept, **values), tell), told


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 4)).cuda()


def steps(model, run, context=None, count=9):
    """What a user keeps of some steps with moving batches."""
    torch.manual_seed(1)
    kept, batches = [], [torch.randn(8, 16, device="cuda") for _ in range(count)]
    for x in batches:
        model.zero_grad()
        out = run(x)
        if context is None:
            out.square().sum().backward()
        else:
            with context:
                out.square().sum().backward()
        kept.append((out, [p.grad for p in model.parameters()]))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01 * p.grad)
    return kept


@pytest.fixture(params=[0, results.LITTLE], ids=["all stay", "large ones stay"])
def stay(request, monkeypatch):
    """Which results stay in the memory of recordings."""
    monkeypatch.setattr(results, "LITTLE", request.param)


@pytest.mark.usefixtures("stay")
@pytest.mark.parametrize(
    ("build", "context"),
    [
        (lambda m: torch.compile(m, backend="retrograd", mode="reduce-overhead"), None),
        (lambda m: aot.module(m, backend="eager", cudagraphs=True), None),
        (lambda m: retrograd.compile(m, mode="reduce-overhead"), None),
        (lambda m: m, retrograd.compiled_autograd(cudagraphs=True, strict=True)),
    ],
    ids=["compile", "aot", "whole", "live"],
)
def test_what_is_kept_of_replayed_steps_is_eagers(build, context):
    model = network()
    other = copy.deepcopy(model)
    expected = steps(model, model)
    before = retrograd.counters["cuda_graph_replays"]
    torch.testing.assert_close(steps(other, build(other), context), expected, rtol=1e-3, atol=1e-4)
    assert retrograd.counters["cuda_graph_replays"] > before


def trained(model, run, zero_grad, micro_batches, count=24):
    """Losses and parameters of a training."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for _ in range(count):
        if zero_grad == "before":
            optimizer.zero_grad()
        for part in range(micro_batches):
            loss = run(torch.randn(8, 16, device="cuda")).square().mean()
            if zero_grad == "between" and not part:
                optimizer.zero_grad()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        if zero_grad == "in place":
            optimizer.zero_grad(set_to_none=False)
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.fixture
def rows_of() -> Iterator[Any]:
    """An operator that waits for the device: how many rows it scales stands in a tensor."""
    with torch.library._scoped_library("retrograd_device", "DEF") as library:

        def scaled(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            made = x.clone()
            made[: int(rows.item())] *= 2
            return made

        library.define("scaled(Tensor x, Tensor rows) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl("scaled", scaled, "CompositeExplicitAutograd")
        torch.library.register_fake(
            "retrograd_device::scaled", lambda x, rows: torch.empty_like(x), lib=library
        )
        torch.library.register_autograd(
            "retrograd_device::scaled",
            lambda ctx, grad: (torch.ops.retrograd_device.scaled(grad, *ctx.saved_tensors), None),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
            lib=library,
        )
        yield torch.ops.retrograd_device.scaled


class _Waiting(nn.Module):
    """A layer that waits for the device in the middle, or has a tensor made on the host there."""

    def __init__(self, scaled: Any) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.scaled = scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.into(x)).sigmoid()
        if self.scaled is not None:
            h = self.scaled[0](h, (h.mean(1) > 0.5).sum())
        else:
            h = h * torch.linspace(0, 1, 32, dtype=h.dtype).sin().to(h.device)
        return x + self.out(nn.functional.dropout(h.tanh(), 0.2, self.training))


@pytest.mark.usefixtures("stay")
@pytest.mark.parametrize("waits", [True, False], ids=["an operator that waits", "a tensor of the host"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_stands_around_what_cannot_be_recorded_is_replayed(rows_of, waits, backend):
    torch.manual_seed(0)
    model = nn.Sequential(*(_Waiting([rows_of] if waits else None) for _ in range(3))).cuda().double()
    other = copy.deepcopy(model)
    run = aot.module(other, backend=backend, cudagraphs=True)
    if backend == "inductor":  # which draws other numbers
        model.eval(), other.eval()
    expected = steps(model, lambda x: model(x.double()), count=14)
    before = retrograd.counters["cuda_graph_replays"]
    torch.testing.assert_close(steps(other, lambda x: run(x.double()), count=14), expected)
    least = 2 * 4 if waits else 2  # of each half, a stretch before, between and behind the operators
    assert retrograd.counters["cuda_graph_replays"] >= before + 6 * least


@pytest.mark.usefixtures("stay")
@pytest.mark.parametrize("zero_grad", ["before", "between", "in place"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training_accumulates_as_eager_does(zero_grad, micro_batches):
    model = network()
    other = copy.deepcopy(model)
    expected = trained(model, model, zero_grad, micro_batches)
    before = retrograd.counters["cuda_graph_replays"]
    compiled = retrograd.compile(other, mode="reduce-overhead")
    torch.testing.assert_close(
        trained(other, compiled, zero_grad, micro_batches), expected, rtol=1e-3, atol=1e-4
    )
    assert retrograd.counters["cuda_graph_replays"] > before + 20 * micro_batches


@pytest.mark.usefixtures("stay")
def test_what_another_stream_reads_is_not_overwritten():
    torch._dynamo.reset()  # other tests compile such a layer too
    size = 2048
    model = nn.Linear(size, size, bias=False, device="cuda")
    compiled = retrograd.compile(model, mode="reduce-overhead")
    other = torch.cuda.Stream()
    busy = torch.ones(size, size, device="cuda")
    for step in range(12):
        x = torch.full((4, size), float(step), device="cuda")
        compiled(x).sum().backward()
        host = torch.empty(size, size, pin_memory=True)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            for _ in range(40):
                busy = (busy @ busy) * 0
            host.copy_(model.weight.grad, non_blocking=True)
            model.weight.grad.record_stream(other)
        model.weight.grad = None
        compiled(torch.full((4, size), 77.0, device="cuda")).sum().backward()
        model.weight.grad = None
        torch.cuda.synchronize()
        assert torch.equal(host, torch.full((size, size), 4.0 * step))
    assert retrograd.counters["cuda_graph_replays"], str(retrograd.explain())


def test_a_whole_step_is_replayed_and_its_optimizer_writes_in_place():
    def trained(model, wrap):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        batches = [torch.randn(8, 16, device="cuda") for _ in range(3)]
        started = [one._version for one in model.parameters()]

        @wrap
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = [step(batches[i % 3]) for i in range(24)]
        parameters = list(model.parameters())
        versions = [one._version - before for one, before in zip(parameters, started, strict=True)]
        return losses, [one.detach() for one in parameters], versions

    model = network()
    other = copy.deepcopy(model)
    expected = trained(model, lambda step: step)
    before = retrograd.counters["cuda_graph_replays"]
    found = trained(other, retrograd.compile_step(backend="inductor", cudagraphs=True, strict=True))
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-3, atol=1e-4)
    assert found[2] == expected[2]
    assert retrograd.counters["cuda_graph_replays"] > before


def test_the_states_of_an_optimizer_do_not_lie_in_what_the_first_step_left():
    weight = torch.ones(2**20, device="cuda", requires_grad=True)
    optimizer = torch.optim.AdamW([weight], 0.01)

    @retrograd.compile_step(backend="aten", cudagraphs=True)
    def step():
        optimizer.zero_grad()
        loss = (weight.expand(64, -1) * 2).sum()  # 256 MiB
        loss.backward()
        optimizer.step()

    step()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 2**27


@pytest.mark.parametrize("draws", [False, True])
def test_a_capture_that_cannot_be_ended_leaves_nothing_behind(draws):
    def reads_a_value(inputs):
        x = inputs[0] + (torch.rand(4, device="cuda") if draws else 0)
        return [inputs[0] * float(x.sum().item() < 0), inputs[0] * 2]

    x = torch.ones(4, device="cuda")
    call, told = call_of(reads_a_value)
    for _ in range(WARM_UPS + 2):
        assert call([x])[1].tolist() == [2] * 4
    assert [reason.code for reason in told] == ["cuda-graphs-failed"]
    torch.rand(3, device="cuda")
    torch.cuda.empty_cache()
    call, told = call_of(lambda inputs: [inputs[0] + 1])
    for _ in range(WARM_UPS + 2):
        assert call([x])[0].tolist() == [2] * 4
    assert not told


def test_inside_a_capture_of_the_users_it_runs_as_it_is():
    x = torch.ones(4, device="cuda")
    call, told = call_of(lambda inputs: [inputs[0] * 2])
    for _ in range(WARM_UPS + 1):
        call([x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call([x])[0]
    x.fill_(5)
    graph.replay()
    assert result.tolist() == [10] * 4
    assert "being captured" in told[0].text


def test_nobody_waits_for_the_stream_that_captures_are_made_on():
    side_streams.watch()
    before = len([*side_streams.separate(side_streams._known())])
    x = torch.ones(4, device="cuda")
    call, _ = call_of(lambda inputs: [inputs[0] * 2])
    for _ in range(WARM_UPS + 2):
        call([x])
    assert call._recordings
    assert len([*side_streams.separate(side_streams._known())]) == before


def test_memory_of_a_pool_of_the_users_is_not_recorded():
    x = torch.ones(4, device="cuda")
    call, _ = call_of(lambda inputs: [inputs[0] * 2])
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        for _ in range(WARM_UPS + 2):
            call([x])
    kept = [call([x.fill_(i)])[0] for i in range(4)]
    assert [result[0].item() for result in kept] == [0, 2, 4, 6]


def test_memory_does_not_grow():
    x = torch.ones(1 << 20, device="cuda")
    call, _ = call_of(lambda inputs: [inputs[0] * 2, inputs[0] + 1], kept=[1])
    for _ in range(WARM_UPS + 2):
        call([x])
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        call([x])
    assert torch.cuda.memory_allocated() == before


def test_batches_in_turn_are_trained_on_one_recording_and_in_the_memory_of_one():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.SiLU()) for _ in range(6)]
    model = nn.Sequential(*layers).cuda()
    batches = [torch.randn(1 << 15, 256, device="cuda") for _ in range(3)]

    def reserved(run) -> int:
        for step in range(12):
            if step == 9:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            model.zero_grad()
            run(batches[step % 3]).square().mean().backward()
        return torch.cuda.max_memory_reserved()

    plain = reserved(aot.module(model, backend="eager"))
    before = retrograd.counters["cuda_graph_recordings"]
    recorded = reserved(aot.module(model, backend="eager", cudagraphs=True))
    assert retrograd.counters["cuda_graph_recordings"] - before <= 4
    assert recorded <= 1.2 * plain


@pytest.mark.usefixtures("stay")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_graphs_that_are_retained_now_and_then_have_their_saved_tensors(backend):
    model = network()
    other = copy.deepcopy(model)
    run = aot.module(other, backend=backend, cudagraphs=True)
    before = retrograd.counters["cuda_graph_replays"]
    for step in range(24):
        x = torch.randn(8, 16, device="cuda")
        for module, forward in ((model, model), (other, run)):
            module.zero_grad()
            loss = forward(x).square().sum()
            if step > WARM_UPS + 6 and step % 3 == 0:
                loss.backward(retain_graph=True)
            loss.backward()
        grads = [[p.grad for p in module.parameters()] for module in (other, model)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
    assert retrograd.counters["cuda_graph_replays"] > before


@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_buffers_of_any_dtype_are_written(dtype, cudagraphs):
    def counted(x, a, b):
        a.copy_((a.float() + 1).to(dtype) if dtype.is_complex else a.flip(0))
        b.copy_(a)
        return x * 2

    results = []
    for run in (counted, aot.function(counted, backend="eager", cudagraphs=cudagraphs)):
        x = torch.ones(3, device="cuda", requires_grad=True)
        a, b = (torch.tensor([1, 0, 1], device="cuda").to(dtype) for _ in range(2))
        for _ in range(6):
            run(x, a, b).sum().backward()
        results.append((x.grad.tolist(), a.tolist(), b.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_dropout_in_attention_is_replayed_and_draws_what_eager_draws(kernel, backend):
    """Recorded and plain calls alternate: a forward and its backward need not be of one kind."""
    attend = nn.functional.scaled_dot_product_attention

    def mixed(q, k, v):
        return attend(q * 2, k, v, dropout_p=0.3).sin()

    def train(run):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        found, held = [], []
        with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, kernel)):
            for step in range(14):
                inputs = [value.detach().requires_grad_() for value in (q, k, v)]
                out = run(*inputs)
                if step == 9:
                    held.append(run(*inputs))  # the recording's results are in use: this one runs as it is
                found += torch.autograd.grad(out.float().square().sum(), inputs)
                if held:
                    found += torch.autograd.grad(held.pop().float().sum(), inputs)
        return [out, *found, torch.rand(3, device="cuda")]

    expected = train(mixed)
    before = retrograd.counters["cuda_graph_replays"]
    with torch._inductor.config.patch(fallback_random=True):
        found = train(aot.function(mixed, backend=backend, cudagraphs=True))
    assert retrograd.counters["cuda_graph_replays"] >= before + 10
    exact = {"rtol": 0, "atol": 0} if backend == "eager" else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(found, expected, **exact)


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_dropout_in_attention_of_an_eager_forward(kernel):
    """Its state lies where that kernel's eager forward puts it: on the host, the backward is not recorded."""

    def train(context):
        torch.manual_seed(0)
        inputs = [
            torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, kernel)):
            for _ in range(8):
                out = nn.functional.scaled_dot_product_attention(*inputs, dropout_p=0.3)
                with context:
                    out.sum().backward()
        return [value.grad for value in inputs]

    found = train(retrograd.compiled_autograd(backend="eager", cudagraphs=True))
    torch.testing.assert_close(found, train(nullcontext()), rtol=0, atol=0)
