"""The live path on a GPU: bits, events, compiled code and memory as eager has them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import retrograd
from retrograd.runtime.streams import side_streams

pytestmark = pytest.mark.gpu

Context = contextlib.AbstractContextManager[object]


def trained(context: Context, rows: int = 8) -> tuple[list[torch.Tensor], list[str], torch.Tensor]:
    """Gradients, events and input gradient of one step of a small hooked network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).cuda()
    events: list[str] = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    x = torch.randn(rows, 16, device="cuda", requires_grad=True)
    hidden = net[:2](x)
    hidden.register_hook(lambda grad: events.append(f"hidden {grad.device.type}"))
    loss = net[2:](hidden).square().mean() + hidden.mean()
    with context:
        loss.backward()
    torch.cuda.synchronize()
    assert x.grad is not None
    return [p.grad for p in net.parameters()], events, x.grad


def test_the_eager_lowering_is_eager_to_the_bit_on_a_gpu() -> None:
    eager, ours = (
        trained(contextlib.nullcontext()),
        trained(retrograd.compiled_autograd("eager", strict=True)),
    )
    assert all(map(torch.equal, eager[0], ours[0]))
    assert eager[1] == ours[1]
    assert torch.equal(eager[2], ours[2])


def test_inductor_compiles_the_segments_with_triton() -> None:
    context = retrograd.compiled_autograd("inductor", strict=True)
    for rows in (8, 8, 12):
        eager, ours = trained(contextlib.nullcontext(), rows), trained(context, rows)
        torch.testing.assert_close(ours[0], eager[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours[2], eager[2], rtol=1e-4, atol=1e-5)
        assert eager[1] == ours[1]
    lowerings = [low for backward in context.explain().backwards for low in backward.lowerings]
    assert {low.how for low in lowerings} == {"inductor"}


def test_a_cpu_and_a_gpu_part_meet() -> None:
    def grads(context: Context) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(6, requires_grad=True)
        scale = torch.randn(6, device="cuda", requires_grad=True)
        loss = ((weight * 2).cuda() * scale).sin().sum().cpu() + weight.cos().sum()
        with context:
            loss.backward()
        assert weight.grad is not None
        assert scale.grad is not None
        return [weight.grad, scale.grad]

    eager = grads(contextlib.nullcontext())
    assert all(map(torch.equal, eager, grads(retrograd.compiled_autograd("eager", strict=True))))
    torch.testing.assert_close(grads(retrograd.compiled_autograd("inductor")), eager)


def test_the_peak_of_a_backward_is_eagers() -> None:
    def peak(context: Context) -> int:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]).cuda()
        x = torch.randn(4096, 256, device="cuda")
        for _ in range(3):
            net.zero_grad(set_to_none=True)
            loss = net(x).square().mean()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with context:
                loss.backward()
            used = torch.cuda.max_memory_allocated() - before
        assert before > 8 * 4096 * 256 * 4
        return before + used

    eager = peak(contextlib.nullcontext())
    for backend in ("eager", "inductor"):
        assert peak(retrograd.compiled_autograd(backend, strict=True)) <= 1.1 * eager


#: How a program makes a stream current.
SWITCHES: dict[str, Callable[[torch.cuda.Stream], Context]] = {
    "torch.cuda.stream": torch.cuda.stream,
    "a stream as a context": lambda stream: stream,
    "torch.accelerator.set_stream": lambda stream: by_set_stream(stream),
}


@contextlib.contextmanager
def by_set_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    outside = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    yield
    torch.accelerator.set_stream(outside)


def spread_over_streams(
    context: Context, waits: bool, switch: str = "torch.cuda.stream"
) -> list[torch.Tensor]:
    """Steps whose two branches run on streams of their own that are kept busy, with hooks that work on yet
    another one; the backward is called from a stream that has waited for nobody if not `waits`."""
    on = SWITCHES[switch]
    torch.manual_seed(0)
    weights = [torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    seen: list[torch.Tensor] = []

    def on_a_stream_of_its_own(grad: torch.Tensor) -> None:
        streams[3].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[3]):
            torch.cuda._sleep(200_000)
            seen.append(grad * 2)
        torch.cuda.current_stream().wait_stream(streams[3])

    for _ in range(3):
        x = torch.randn(256, 64, device="cuda")
        torch.cuda.synchronize()
        halves = []
        for weight, stream in zip(weights, streams[:2], strict=False):
            with on(stream):
                torch.cuda._sleep(2_000_000)
                half = (x @ weight).tanh()
                half.register_hook(on_a_stream_of_its_own)
                halves.append((half * half).sin())
        for stream in streams[:2]:
            torch.cuda.current_stream().wait_stream(stream)
        loss = ((halves[0] + halves[1]) @ weights[2]).square().mean()
        if waits:
            torch.cuda.synchronize()
        with context, torch.cuda.stream(streams[2]):
            loss.backward()
        torch.cuda.current_stream().wait_stream(streams[2])
        # Memory that the backward let go is taken at once by the streams of the forward.
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                torch.full((256, 64), float("nan"), device="cuda")
    torch.cuda.synchronize()
    return [*[weight.grad for weight in weights if weight.grad is not None], *seen]


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_forwards_on_several_streams(backend: str, switch: str) -> None:
    expected = spread_over_streams(contextlib.nullcontext(), waits=True)
    context = retrograd.compiled_autograd(backend, strict=True)
    for _ in range(3):
        found = spread_over_streams(context, waits=False, switch=switch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_stream_of_another_thread_is_waited_for(switch: str) -> None:
    """Its thread has made nodes on it and never leaves it; ours calls the backward without waiting."""
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    x, stream, losses = torch.randn(256, 64, device="cuda"), torch.cuda.Stream(), []
    expected = torch.autograd.grad((x @ weight).tanh().square().sum(), weight)

    def forward() -> None:
        SWITCHES[switch](stream).__enter__()
        torch.cuda._sleep(50_000_000)
        losses.append((x @ weight).tanh().square().sum())

    torch.cuda.synchronize()
    with retrograd.compiled_autograd("eager", strict=True):
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        found = torch.autograd.grad(losses, weight)
    torch.testing.assert_close(found, expected)


def test_streams_without_nodes_are_left_to_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks copy gradients to the CPU on their own stream, as offloading does: we add no wait."""
    counts: list[int] = []
    original = torch.cuda.Stream.wait_stream

    def counting(self: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        counts[-1] += 1
        original(self, other)

    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", counting)
    monkeypatch.setattr(side_streams, "_current_on", {})  # other tests have left streams current on threads
    weights = [torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(4)]
    stream, copies = torch.cuda.Stream(), []

    def offload(grad: torch.Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copies.append(grad.to("cpu", non_blocking=True))
        grad.record_stream(stream)

    def step(context: Context) -> list[torch.Tensor]:
        counts.append(0)
        copies.clear()
        x = torch.ones(8, 64, device="cuda")
        for weight in weights:
            x = (x @ weight).tanh()
            x.register_hook(offload)
        with context:
            x.sum().backward()
        torch.cuda.synchronize()
        return [copy.clone() for copy in copies]

    context = retrograd.compiled_autograd("eager")
    eager, *ours = step(contextlib.nullcontext()), *(step(context) for _ in range(3))
    assert counts == [4] * 4
    assert all(all(map(torch.equal, eager, one)) for one in ours)


def test_one_stream_waits_for_nothing() -> None:
    program = """
import torch, retrograd
from retrograd.runtime.streams import side_streams
x = torch.ones(3, device="cuda", requires_grad=True)
with retrograd.compiled_autograd("eager"):
    x.sin().sum().backward()
assert not side_streams.any
with torch.cuda.stream(torch.cuda.Stream()):
    pass
assert side_streams.any
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_model_on_two_devices(backend: str) -> None:
    def grads(context: Context) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first, second = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 2).to("cuda:1")
        loss = second(first(torch.randn(4, 8, device="cuda:0")).relu().to("cuda:1")).square().mean()
        with context:
            loss.backward()
        return [p.grad for p in (*first.parameters(), *second.parameters()) if p.grad is not None]

    expected = grads(contextlib.nullcontext())
    found = grads(retrograd.compiled_autograd(backend))
    assert [grad.device for grad in found] == [grad.device for grad in expected]
    torch.testing.assert_close(found, expected)


def test_compiled_forwards_on_a_gpu_come_out_in_eagers_order() -> None:
    for forward in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        expected = trained_through(forward=None, context=contextlib.nullcontext())
        for backend in ("eager", "inductor"):
            found = trained_through(forward, retrograd.compiled_autograd(backend))
            assert found[1] == expected[1]
            torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)


def trained_through(forward: str | None, context: Context) -> tuple[list[torch.Tensor], list[str]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).cuda()
    events: list[str] = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    run = torch.compile(net, backend=forward) if forward else net
    x = torch.randn(8, 16, device="cuda")
    with context:
        run(x).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None], events
