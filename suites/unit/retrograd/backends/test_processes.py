"""Processes that compile beside this one: their code is found, and what goes wrong in them changes nothing.

One process serves several tests, because it takes seconds to start.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters as stock_counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import retrograd
from retrograd.backends import processes
from retrograd.backends.base import Answer, GraphKind
from retrograd.backends.inductor import portable_settings
from retrograd.backends.registry import InductorBackend
from retrograd.events import counters
from retrograd.serialize import Reader, Writer
from retrograd.trace import new_fake_mode

pytestmark = pytest.mark.programs

BACKEND = InductorBackend()
FORWARD = GraphKind(visible=1)
HOW_MANY = processes.how_many


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process, whose folder for code is a new one."""
    folder = tmp_path_factory.mktemp("inductor")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setattr(processes, "how_many", lambda: 1)
        patch.setattr(processes, "IDLE", 300)
        yield
        processes.stop()


@pytest.fixture(autouse=True)
def afresh() -> None:
    counters.clear()
    stock_counters.clear()


def graph_of(fn: Callable[..., Any], *sizes: int) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Of a function of one tensor; and a fake of that."""
    with FakeTensorMode() as mode:
        fake = torch.empty(sizes)
    gm = make_fx(lambda x: (fn(x),))(fake)
    assert gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode is mode
    return gm, [fake]


def begun(gm: torch.fx.GraphModule, inputs: list[Any], half: GraphKind = FORWARD) -> Answer | None:
    """Have a process begin with the graph, and wait until it has."""
    processes.start()
    answer = BACKEND.begin(gm, inputs, half)
    until = time.monotonic() + 120
    while answer is not None and not (answer.running() or answer.done()):
        assert time.monotonic() < until, "the process does not begin"
        time.sleep(0.01)
    return answer


def check(fn: Callable[..., Any], gm: torch.fx.GraphModule, inputs: list[Any], answer: Answer | None) -> None:
    """Compile it here, once the process is done that has begun with it, and compare."""
    x = torch.randn(inputs[0].shape)
    processes.is_done(answer, once_begun=True)
    (got,) = BACKEND.compile(gm, inputs, FORWARD)([x])
    assert torch.allclose(got, fn(x))


def test_code_that_another_process_made_is_found() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 3

    gm, inputs = graph_of(fn, 4, 6)
    check(fn, gm, inputs, begun(gm, inputs))
    assert counters["compiled_elsewhere"] == 1
    assert stock_counters["inductor"]["fxgraph_cache_hit"] == 1
    assert stock_counters["inductor"]["fxgraph_cache_miss"] == 0


def test_a_graph_that_no_process_has_begun_with_is_compiled_here() -> None:
    gm, inputs = graph_of(torch.cos, 5)
    check(torch.cos, gm, inputs, Answer())
    assert counters["compiled_elsewhere"] == 0
    assert stock_counters["inductor"]["fxgraph_cache_miss"] == 1


@contextmanager
def an_operator_of_this_function(name: str) -> Iterator[Callable[..., Any]]:
    """An operator that doubles a tensor. No module defines it."""
    with torch.library._scoped_library("retrograd_test", "DEF") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl(name, torch.empty_like, "Meta")
        yield getattr(torch.ops.retrograd_test, name)


def test_what_the_other_process_cannot_compile_is_compiled_here() -> None:
    with an_operator_of_this_function("twice") as twice:
        gm, inputs = graph_of(twice, 3, 2)
        check(twice, gm, inputs, begun(gm, inputs))
    assert counters["compiled_elsewhere"] == 0


def test_what_could_not_be_compiled_elsewhere_keeps_nothing_of_who_has_waited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "retrograd.aot")
    processes.start()
    with an_operator_of_this_function("twice_again") as twice:
        answer = BACKEND.begin(*graph_of(twice, 3, 5), FORWARD)
        kept: list[weakref.ref[torch.Tensor]] = []

        def wait() -> bool:
            held = torch.ones(3)
            kept.append(weakref.ref(held))
            return processes.is_done(answer)

        assert not wait()
        assert "retrograd_test::twice_again is not registered" in said(caplog)
        assert kept[0]() is None  # while `answer` still knows why


#: modules that define an operator ``OPERATOR``, which doubles a tensor.
DEFINING = {
    "a decorator": """
import torch

@torch.library.custom_op("retrograd_test::OPERATOR", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

double.register_fake(torch.empty_like)
""",
    "a library": """
import torch

library = torch.library.Library("retrograd_test", "FRAGMENT")
library.define("OPERATOR(Tensor x) -> Tensor")
library.impl("OPERATOR", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("retrograd_test::OPERATOR", torch.empty_like)
""",
    "an overload": """
import torch

library = torch.library.Library("retrograd_test", "FRAGMENT")
library.define("OPERATOR.other(Tensor x) -> Tensor")
library.impl("OPERATOR.other", lambda x: x * 2, "CompositeExplicitAutograd")
library.impl("OPERATOR.other", torch.empty_like, "Meta")
""",
}


def test_modules_are_imported_there_that_define_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    processes.stop()  # those that there are do not know the folder
    for number, (how, source) in enumerate(DEFINING.items()):
        operator = f"doubled{number}"
        (tmp_path / f"defines_{operator}.py").write_text(source.replace("OPERATOR", operator))
        importlib.import_module(f"defines_{operator}")
        double = getattr(torch.ops.retrograd_test, operator)
        gm, inputs = graph_of(double, 2, 3)
        check(double, gm, inputs, begun(gm, inputs))
        assert counters["compiled_elsewhere"] == number + 1, how
    processes.stop()


def test_inductor_names_kernels_of_a_graph_that_was_sent_after_their_operators() -> None:
    gm, _ = graph_of(torch.sin, 4)
    writer = Writer()
    reader = Reader(writer.document(writer.graph(gm)), new_fake_mode(False))
    sent = reader.graph(reader.body)
    calls = sent.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert [node.meta["original_aten"] for node in calls] == [torch.ops.aten.sin.default]


def test_symbolic_sizes_are_not_sent() -> None:
    gm = make_fx(lambda x: (x.sin(),), tracing_mode="symbolic")(torch.randn(7, 3))
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    processes.start()
    assert BACKEND.begin(gm, inputs, FORWARD) is None


@pytest.mark.parametrize("name", processes.MEASURING)
def test_nothing_is_measured_beside_other_work(name: str) -> None:
    assert name in torch._inductor.config.save_config_portable()
    processes.start()
    assert InductorBackend({name: True}).begin(*graph_of(torch.sin, 3), FORWARD) is None
    processes.stop()
    with torch._inductor.config.patch({name: True}):
        processes.start()
        assert BACKEND.begin(*graph_of(torch.sin, 3), FORWARD) is None


def test_a_process_that_dies_is_no_error_and_another_is_started() -> None:
    gm, inputs = graph_of(torch.tanh, 9)
    processes.start()
    before = processes._now
    os.killpg(before._process.pid, signal.SIGKILL)
    check(torch.tanh, gm, inputs, BACKEND.begin(gm, inputs, FORWARD))
    assert counters["compiled_elsewhere"] == 0
    until = time.monotonic() + 60
    while before.is_usable:
        assert time.monotonic() < until
        time.sleep(0.01)
    processes.start()
    assert processes._now is not before


def test_a_process_with_other_settings_does_not_work() -> None:
    gm, inputs = graph_of(torch.exp, 8)
    torch.use_deterministic_algorithms(True)  # is not among what is set there
    try:
        check(torch.exp, gm, inputs, begun(gm, inputs))
    finally:
        torch.use_deterministic_algorithms(False)
    assert counters["compiled_elsewhere"] == 0


def test_what_vmap_registers_is_no_other_setting() -> None:
    before = portable_settings()
    torch.vmap(torch.addr)(torch.randn(2, 3, 3), torch.randn(2, 3), torch.randn(2, 3))
    assert any(name.startswith("aten/addr/FuncTorch") for name in torch.library._impls)
    assert portable_settings() == before


def test_reset_ends_them() -> None:
    processes.start()
    process = processes._now._process
    retrograd.reset()
    assert process.returncode is not None
    assert processes._now is None


def test_a_forked_child_leaves_them_to_its_parent() -> None:
    processes.start()
    now = processes._now
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    answer = lambda: theirs.send((processes._now, [c.closed for c in now._connections]))  # noqa: E731
    child = fork.Process(target=answer)
    child.start()
    assert ours.poll(60), "the child is stuck"
    assert ours.recv() == (None, [True])
    child.join()
    assert processes._now is now
    assert not now._connections[0].closed


def test_a_machine_that_starts_no_process_compiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("too many open files")

    processes.stop()
    monkeypatch.setattr(processes, "Pipe", refuse)
    processes.start()
    gm, inputs = graph_of(torch.sigmoid, 4)
    check(torch.sigmoid, gm, inputs, BACKEND.begin(gm, inputs, FORWARD))
    assert processes._now is None


def test_none_is_started_without_a_cache_on_disk() -> None:
    processes.stop()
    with torch._inductor.config.patch(fx_graph_cache=False):
        processes.start()
    assert processes._now is None


def test_there_is_one_for_every_four_of_inductors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, count in ((1, 0), (3, 0), (4, 1), (8, 2), (64, 4)):
        monkeypatch.setattr(processes, "compile_threads", lambda threads=threads: threads)
        assert HOW_MANY() == count


class Block(torch.nn.Module):
    """A layer that draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.dropout(self.norm(self.linear(x)).tanh(), 0.25)


class Blocks(torch.nn.Module):
    """Four of them. The code is of its own: sizes of one that other tests have compiled may be symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def training(whole_after: int | None) -> tuple[Callable[[], torch.Tensor], torch.nn.Module]:
    """A step that gives its loss, and the model that it trains."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(4, 8)
    compiled = retrograd.compile(model, options={"regions": 4, "whole_after": whole_after})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def test_code_of_the_whole_takes_the_place_of_parts_and_computes_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "retrograd.aot")
    step, model = training(whole_after=3)
    losses = [step() for _ in range(6)]
    assert counters["region_calls"] > 0
    assert counters["whole_graphs"] == 2, f"not forward and backward:\n{said(caplog)}"
    counters.clear()
    step, twin = training(whole_after=None)
    torch.testing.assert_close(losses, [step() for _ in range(6)])
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
    assert counters["whole_graphs"] == 0


def test_parts_remain_where_settings_are_others_than_when_they_were_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "retrograd.aot")
    step, _ = training(whole_after=2)
    step()
    with torch._inductor.config.patch(epilogue_fusion=False):
        step()
    step()
    assert counters["region_calls"] > 0
    assert counters["whole_graphs"] == 0
    why = "parts remain: settings have changed since: inductor, environment"
    assert said(caplog).splitlines().count(why) == 2


def said(caplog: pytest.LogCaptureFixture) -> str:
    """What was logged of other processes, and of what they were to compile."""
    return "\n".join(
        record.getMessage() for record in caplog.records if record.name.startswith("retrograd.aot")
    )


def test_what_was_done_elsewhere_is_known_when_the_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "IDLE", 0.2)
    answer = begun(*graph_of(torch.erf, 7))
    now, until = processes._now, time.monotonic() + 120
    while now.is_usable:
        assert time.monotonic() < until, "it did not end"
        time.sleep(0.01)
    assert processes.is_done(answer)
    assert counters["compiled_elsewhere"] == 1
    processes.start()
    assert processes._now is not now


def test_processes_do_not_end_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "IDLE", 0)
    processes.stop()
    processes.start()
    answers = [BACKEND.begin(*graph_of(torch.lgamma, size), FORWARD) for size in (7, 8, 9)]
    assert all(map(processes.is_done, answers))


def test_nobody_waits_for_a_process_that_was_ended() -> None:
    processes.start()
    with processes._changing:
        answers = [BACKEND.begin(*graph_of(torch.erfc, size), FORWARD) for size in (7, 8)]
        processes.stop()
    assert not any(map(processes.is_done, answers))
    assert counters["compiled_elsewhere"] == 0


def test_a_forked_child_does_not_wait_for_what_its_parent_has_begun() -> None:
    processes.start()
    answer = BACKEND.begin(*graph_of(torch.log1p, 7), FORWARD)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send(processes.is_done(answer)))
    child.start()
    assert ours.poll(60), "the child is stuck"
    assert not ours.recv()
    child.join()
    assert processes.is_done(answer)
    assert counters["compiled_elsewhere"] == 1


def test_the_whole_is_not_compiled_elsewhere_without_a_cache_on_disk() -> None:
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert BACKEND.process_settings() is None
