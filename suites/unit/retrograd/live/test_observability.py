"""What people see of a backward: logs, structured trace, profiler ranges, names and lines in the graphs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import retrograd
from retrograd.events import LOGS, switch_logs
from unit.retrograd.programs import Square, everything, leaf, observed

PROGRAM = """
import torch, retrograd

def backward(rows):
    w.grad = None
    h = torch.ones(rows, 3) @ w
    h.register_hook(lambda grad: grad * 2)
    h.sin().sum().backward()

w = torch.ones(3, 3, requires_grad=True)
with retrograd.compiled_autograd("aten", dynamic=False):
    for rows in (2, 3, 3, 4):
        backward(rows)
    with torch.autograd.detect_anomaly(check_nan=False):
        backward(2)
"""


def run(env: dict[str, str], program: str = PROGRAM) -> str:
    """What `program` writes to its error stream."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::UserWarning:torch", "-c", program],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stderr


def test_our_variable_writes_the_named_logs_and_warns_of_unknown_names() -> None:
    text = run({"RETROGRAD_LOGS": "schedule,recompiles,speed"})
    assert (
        "RETROGRAD_LOGS: unknown speed\n  known  graph, schedule, guards, recompiles, cache, progress" in text
    )
    assert "tensor hook at MmBackward0 (3 of 5)" in text
    assert "[retrograd.live.recompiles]" in text
    assert "segment 0 is lowered again: argument 1 was 3, now 4" in text
    assert "a backward ran on the stock engine: anomaly mode" in text
    assert "[retrograd.live.graph]" not in text
    assert "[retrograd.live.guards]" not in text


AHEAD_OF_TIME = """
import torch
from retrograd import aot

{wrap}
def refuse(gm, example_inputs):
    raise ValueError("not this one")

call = wrap(lambda x: x.sin(), "eager")
call(torch.ones(2, requires_grad=True)).sum().backward()
call(torch.ones(3, 4, requires_grad=True))
wrap(lambda x: x.cos(), refuse)(torch.ones(2, requires_grad=True))
"""


@pytest.mark.parametrize(
    ("wrap", "guards"),
    [
        ("wrap = lambda fn, how: aot.function(fn, backend=how, dynamic=False)", True),
        ('wrap = lambda fn, how: torch.compile(fn, backend="retrograd", options={"backend": how})', False),
    ],
)
def test_our_variable_names_the_logs_of_what_is_captured_ahead_of_time_too(wrap: str, guards: bool) -> None:
    text = run({"RETROGRAD_LOGS": "graph,guards,recompiles"}, AHEAD_OF_TIME.replace("{wrap}", wrap))
    assert "[retrograd.aot.graph]" in text
    assert "cotangent" in text
    assert "call forward" in text
    assert "ValueError: not this one" in text
    assert "[retrograd.aot.recompiles]" in text
    assert ("1 tensors: type, dtype" in text) is guards
    assert ("is compiled again: " in text) is guards


def test_torch_logs_knows_our_loggers() -> None:
    text = run({"TORCH_LOGS": "+retrograd.live"})
    for part in (
        "MmBackward0([call_tensor_hook]",
        "tensor hook at",
        "2 tensors: type, dtype",
        "is lowered again",
    ):
        assert part in text


def test_the_structured_trace_has_every_stage_under_an_id_of_its_own(tmp_path: Path) -> None:
    run({"TORCH_TRACE": str(tmp_path)})
    (log,) = tmp_path.iterdir()
    records = [json.loads(line[line.index("{") :]) for line in log.read_text().splitlines() if line[0] == "V"]
    artifacts = {
        (record.get("compiled_autograd_id"), record["artifact"]["name"])
        for record in records
        if "artifact" in record and record["artifact"]["name"].startswith("retrograd")
    }
    first = {name for number, name in artifacts if number == 0}
    assert first == {
        "retrograd_backward_graph",
        "retrograd_hook_schedule",
        "retrograd_plan",
        *(f"retrograd_segment_{i}_{what}" for i in (0, 1) for what in ("graph", "guards")),
    }
    assert {"retrograd_segment_0_recompile_reason", "retrograd_fallback"} <= {name for _, name in artifacts}
    text = log.read_text()
    assert "def run_backward(call, backward, changes, user):" in text
    for name in ("collect", "lay_out", "trace", "compile", "run"):
        assert f'"name": "retrograd.{name}"' in text


def test_the_structured_trace_has_the_graphs_of_a_compiled_forward(tmp_path: Path) -> None:
    program = """
import torch
f = torch.compile(lambda x: x.sin().exp(), backend="retrograd", options={"backend": "eager"})
f(torch.ones(3, requires_grad=True)).sum().backward()
"""
    run({"TORCH_TRACE": str(tmp_path)}, program)
    (log,) = tmp_path.iterdir()
    records = [json.loads(line[line.index("{") :]) for line in log.read_text().splitlines() if line[0] == "V"]
    found = [record for record in records if record.get("artifact", {}).get("name", "").startswith("retro")]
    assert [record["artifact"]["name"] for record in found] == [
        "retrograd_joint_graph",
        "retrograd_forward_graph",
        "retrograd_backward_0_graph",
    ]
    assert {record["frame_id"] for record in found} == {0}, "they are filed under the frame of Dynamo's"


def test_a_log_switched_on_twice_has_one_handler() -> None:
    log = LOGS["guards"]
    before = (log.level, log.propagate, list(log.handlers))
    try:
        switch_logs("guards, +guards")
        switch_logs("guards")
        assert len(log.handlers) == 1
        with pytest.warns(UserWarning, match="unknown nothing"):
            switch_logs("nothing")
    finally:
        log.level, log.propagate, log.handlers = before


# what nobody reads is not made


def test_texts_are_not_made_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_wanted(*args: object) -> str:
        raise AssertionError("a text that nobody reads")

    monkeypatch.setattr("retrograd.live.plan_log.readable", not_wanted)
    monkeypatch.setattr("retrograd.live.plan_log.readable_schedule", not_wanted)
    monkeypatch.setattr(torch._C._autograd, "_profiler_enabled", lambda: False)
    trace_log = torch._logging._internal.trace_log
    monkeypatch.setattr(trace_log, "handlers", [])
    with retrograd.compiled_autograd("aten", strict=True):
        leaf().sin().sum().backward()


# names and lines


def test_aten_nodes_name_their_autograd_node_and_its_forward_line() -> None:
    w = leaf()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        root = (w.sin() * 2).sum()
    seen: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        seen.append(gm)
        return gm.forward

    with retrograd.compiled_autograd(backend, strict=True) as context:
        root.backward()
    named = {
        str(node.target): node.meta["custom"]["autograd_node"]
        for node in seen[0].graph.nodes
        if node.op == "call_function"
    }
    assert named["aten.cos.default"] == "SinBackward0 (3 of 5)"
    assert named["aten.expand.default"] == "SumBackward0 (1 of 5)"
    for text in (context.explain().print_readable(False), seen[0].print_readable(print_output=False)):
        assert "code: root = (w.sin() * 2).sum()" in text
        assert "SinBackward0 (3 of 5)" in text


def test_a_functions_node_shows_where_its_backward_is() -> None:
    with retrograd.compiled_autograd("eager") as context:
        Square.apply(leaf()).sum().backward()
    line = Square.backward.__code__.co_firstlineno
    assert (
        f"# SquareBackward (2 of 4)  programs.py:{line}  Square.backward"
        in context.explain().print_readable(False)
    )


# profiler


def ranges(backend: str | None) -> list[str]:
    """Names of the ranges of one backward, in the order in which they begin, without torch's operations."""
    w = leaf()
    y = Square.apply(w.sin())
    y.register_hook(lambda grad: None)
    root = (y * 2).sum()

    def step() -> list[str]:
        w.grad = None
        with torch.autograd.profiler.profile() as profile:
            root.backward(retain_graph=True)
        events = sorted(
            profile.function_events, key=lambda event: (event.time_range.start, -event.time_range.end)
        )
        return [e.name for e in events if not e.name.startswith("aten::")]

    if backend is None:
        return step()
    with retrograd.compiled_autograd(backend, strict=True):
        step()
        return step()


def test_the_eager_lowering_has_eagers_ranges_for_every_node() -> None:
    ours = [name for name in ranges("eager") if not name.startswith("retrograd")]
    assert [name for name in ours if "_RunBody" not in name and "tensor hook" not in name][:10] == ranges(
        None
    )[:10]
    assert "tensor hook of SquareBackward" in ours


def test_a_compiled_segment_is_one_range_that_names_its_nodes() -> None:
    ours = ranges("aten")
    assert "retrograd segment 0: SumBackward0, MulBackward0" in ours
    assert "autograd::engine::evaluate_function: SquareBackward" in ours
    assert "retrograd.collect" in ours
    assert "retrograd.run" in ours


def test_gradients_under_a_profiler_are_eagers_to_the_bit() -> None:
    grad, events = observed(contextlib.nullcontext(), everything)
    with torch.autograd.profiler.profile():
        ours = observed(retrograd.compiled_autograd("eager", strict=True), everything)
    assert torch.equal(ours[0], grad)
    assert ours[1] == events
