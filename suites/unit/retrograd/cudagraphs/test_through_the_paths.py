"""Recordings made by the AOT halves and by live segments, on a recorder that needs no device."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc

import pytest
import torch
import torch._dynamo
from torch import nn

import retrograd
from retrograd import aot
from retrograd.cudagraphs import graphed_call, graphed_function, results
from retrograd.dynamo import retrograd as backend
from unit.retrograd.cudagraphs.without_device import Recorder


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    torch._dynamo.reset()  # other tests may have brought it to its recompile limit
    made = Recorder()
    monkeypatch.setattr(graphed_function, "_program", made.program)
    return made


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3))


def steps(model, run, context=None, count=8):
    """What a user keeps of equal steps: outputs and gradients."""
    x, kept = torch.randn(5, 4), []
    for _ in range(count):
        model.zero_grad()
        out = run(x)
        with context or contextlib.nullcontext():
            out.square().sum().backward()
        kept.append((out, [p.grad for p in model.parameters()]))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    return kept


def as_eager(build, context=None, count=8):
    """Whether all that was kept is, at the end, what eager gives."""
    model = network()
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = steps(model, model, count=count)
    torch.manual_seed(1)
    torch.testing.assert_close(steps(other, build(other), context, count), expected)


def test_the_halves_of_a_module_are_replayed(recorder):
    as_eager(lambda model: aot.module(model, backend="eager", cudagraphs=True), count=16)
    assert recorder.records >= 2
    # a recording is for addresses, and the C library decides how soon these repeat themselves
    assert recorder.replays >= 2 * (16 - graphed_call.WARM_UPS - 8)


def test_batches_in_turn_take_one_recording_of_each_half(recorder):
    model = network()
    other, batches = copy.deepcopy(model), [torch.randn(5, 4) for _ in range(3)]
    cotangents = [torch.randn_like(model(batch)) for batch in batches]  # which lie where they are
    run = aot.module(other, backend="eager", cudagraphs=True)
    for step in range(12):
        kept = []
        for module, forward in ((model, model), (other, run)):
            module.zero_grad()
            forward(batches[step % 3]).backward(cotangents[step % 3])
            kept.append([p.grad for p in module.parameters()])
        torch.testing.assert_close(*kept)
    assert recorder.records == 2


def test_the_mode_reduce_overhead_replays(recorder):
    chosen = functools.partial(backend, mode="reduce-overhead", options={"backend": "aten"})
    as_eager(lambda model: torch.compile(model, backend=chosen))
    assert recorder.replays


def test_live_segments_are_replayed(recorder):
    context = retrograd.compiled_autograd("aten", cudagraphs=True, strict=True)
    as_eager(lambda model: model, context)
    assert recorder.replays
    assert not context.explain().backwards[0].notes


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.SiLU()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(4, 3))


def test_all_regions_of_a_plan_are_one_recording(recorder):
    context = retrograd.compiled_autograd("aten", cudagraphs=True, regions=2, strict=True)
    found, wanted = deep(), deep()
    torch.manual_seed(1)
    expected = steps(wanted, wanted, count=16)
    torch.manual_seed(1)
    torch.testing.assert_close(steps(found, found, context, count=16), expected)
    assert len(context.explain().backwards[0].schedule.segments) > 2
    before = recorder.replays
    steps(found, found, context, count=4)
    assert recorder.replays - before <= 4
    # one for all segments, and again when an input comes from elsewhere, which the C library decides
    assert 1 <= recorder.records <= graphed_call.MOST_RECORDINGS


def test_segments_between_hooks_are_recorded_one_by_one(recorder):
    context = retrograd.compiled_autograd("aten", cudagraphs=True)
    seen = []

    def build(model):
        model[1].register_full_backward_hook(lambda *_: seen.append(len(seen)))
        return model

    as_eager(build, context)
    assert len(seen) == 8
    assert recorder.replays


def test_live_segments_behind_a_recorded_forward(recorder):
    context = retrograd.compiled_autograd("aten", cudagraphs=True)
    as_eager(lambda model: aot.module(model, backend="aten", cudagraphs=True), context)
    assert recorder.replays


def test_retrograd_compile_takes_the_mode_for_both_paths(recorder):
    as_eager(lambda model: retrograd.compile(model, backend="aten", mode="reduce-overhead"))
    assert recorder.replays


def test_a_forward_does_not_touch_what_one_before_it_saved(recorder):
    model = network()
    run = aot.module(model, backend="eager", cudagraphs=True)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    steps(model, run)
    replays = recorder.replays
    for order in ((0, 1), (1, 0)):
        model.zero_grad()
        outputs = [run(x), run(y)]
        for i in order:
            outputs[i].square().sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (model(x).square().sum() + model(y).square().sum()).backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])
    assert recorder.replays > replays


def test_a_live_context_without_a_device_says_that_nothing_is_recorded():
    context = retrograd.compiled_autograd("aten", cudagraphs=True)
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):  # the first with no .grad; the plan settles in its second run, and would be recorded
        with context:
            x.sin().exp().sum().backward()
    assert "no CUDA graph is recorded: it has tensors on cpu" in str(context.explain())


class Block(nn.Module):
    """A layer; those of one size share their compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return torch.tanh(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


def blocks(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), *[Block() for _ in range(count)])


def test_layers_that_share_code_have_recordings_of_their_own(recorder):
    model = blocks(6)
    other = copy.deepcopy(model)
    for block in other[1:]:
        block.compile(backend="retrograd", options={"backend": "aten", "cudagraphs": True})
    torch.manual_seed(1)
    expected = steps(model, model)
    torch.manual_seed(1)
    torch.testing.assert_close(steps(other, other), expected)
    before = recorder.records, recorder.replays
    steps(other, other, count=4)
    assert recorder.records - before[0] <= 2  # the first block's inputs may move
    assert recorder.replays - before[1] >= 4 * 12 - 4


def test_recordings_go_with_the_layers_whose_parameters_they_read(recorder):
    model = blocks(3)
    for block in model[1:]:
        block.compile(backend="retrograd", options={"backend": "aten", "cudagraphs": True})
    steps(model, model)

    def recordings() -> int:  # there is a pool more if memory was in use when one was made
        return sum(len(pool.handle.recordings) for pool in recorder.program.pools.values())

    before = recordings()
    del model[1]
    gc.collect()
    assert recordings() == before - 2
    steps(model, model)


def test_an_optimizer_reads_gradients_of_a_mebibyte_from_wherever_they_come(recorder):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), *[nn.Linear(64, 64) for _ in range(80)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x, held = torch.randn(4, 64), []

    @retrograd.compile_step(backend="aten", cudagraphs=True)
    def step():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for number in range(16):
        step()
        held.append([p.grad for p in model.parameters()][: number % 5])  # so that memory is elsewhere
    assert sum(p.nbytes for p in model.parameters()) > 2**20
    before = recorder.replays
    for _ in range(4):
        step()
    assert recorder.replays - before == 3 * 4


def sizes_in_turn(run, model, sizes, rounds=8):
    """What a user keeps of steps with inputs of these sizes, one after the other."""
    kept = []
    for number in range(rounds * len(sizes)):
        x = torch.full((sizes[number % len(sizes)], 4), 0.1 * (number + 1), requires_grad=True)
        out = run(x)
        out.square().sum().backward()
        kept.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
    return kept


@pytest.mark.parametrize("way", ["compile", "module"])
def test_each_set_of_sizes_that_comes_back_has_its_recordings(recorder, way):
    retrograd.reset()
    model = network()
    other = copy.deepcopy(model)
    chosen = functools.partial(backend, options={"backend": "aten", "cudagraphs": True})
    run = (
        torch.compile(other, backend=chosen, dynamic=True)
        if way == "compile"
        else aot.module(other, backend="aten", cudagraphs=True, dynamic=True)
    )
    sizes = [5, 7, 9]  # none is a number of features, which would be another guard
    torch.testing.assert_close(sizes_in_turn(run, other, sizes), sizes_in_turn(model, model, sizes))
    assert recorder.records >= 2 * len(sizes)
    assert len(set(recorder.lie_in)) <= 2, "all sizes share their pools"
    assert recorder.replays >= len(sizes) * 4
    assert not retrograd.explain().notes


def test_results_that_a_program_drops_are_overwritten_by_other_sizes(recorder, monkeypatch):
    monkeypatch.setattr(results, "LITTLE", 0)
    pools, make = [], recorder.new_pool
    monkeypatch.setattr(recorder, "new_pool", lambda device: pools.append(make(device)) or pools[-1])

    def held(sizes):
        """How many blocks of pools are in use between steps."""
        pools.clear()
        model = network()
        other = copy.deepcopy(model)
        run = retrograd.compile(other, backend="eager", dynamic=True, options={"cudagraphs": True})
        for batch in sizes * 8:
            x = torch.full((batch, 4), 0.1 * batch)
            for each, call in ((model, model), (other, run)):
                each.zero_grad()
                call(x).square().sum().backward()
            torch.testing.assert_close(*[[p.grad for p in each.parameters()] for each in (other, model)])
        assert recorder.replays
        return sum(not block.is_free() for pool in pools for block in pool.blocks)

    assert held([5, 7, 9]) <= held([5]) + 2


def test_what_has_many_sizes_runs_as_it_is_from_some_number_on(recorder, monkeypatch):
    retrograd.reset()
    monkeypatch.setattr(graphed_function, "MOST_SIZES", 2)
    model = network()
    other = copy.deepcopy(model)
    chosen = functools.partial(backend, options={"backend": "aten", "cudagraphs": True})
    run = torch.compile(other, backend=chosen, dynamic=True)
    for sizes in ([5, 7], [8, 9, 10]):
        torch.testing.assert_close(sizes_in_turn(run, other, sizes), sizes_in_turn(model, model, sizes))
    before = recorder.records
    torch.testing.assert_close(sizes_in_turn(run, other, [5, 8]), sizes_in_turn(model, model, [5, 8]))
    assert recorder.records == before
    assert [reason.code for reason in retrograd.explain().notes] == ["cuda-graphs-sizes"]
