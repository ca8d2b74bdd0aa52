"""The public surface: names, laziness, arguments, reports, and the probe of the installed torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import retrograd
from retrograd._torch import probe
from unit.retrograd.programs import leaf


def test_importing_is_lazy() -> None:
    code = "import sys, retrograd; print([m for m in sys.modules if m.startswith(('torch.', 'retrograd.'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['retrograd.version']"  # a constant, and nothing of torch


def test_every_public_name_resolves_and_is_listed() -> None:
    assert set(retrograd.__all__) <= set(dir(retrograd))
    for name in retrograd.__all__:
        assert getattr(retrograd, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = retrograd.nothing


def test_explain_runs_a_function_and_reports_what_was_captured() -> None:
    w = leaf()
    w.register_hook(lambda grad: None)
    report = retrograd.explain(lambda scale: (w * scale).sum().backward(), 3.0)
    (backward,) = report.backwards
    assert [call.name for call in backward.graph.node_calls] == [
        "torch::autograd::GraphRoot",
        "SumBackward0",
        "MulBackward0",
        "torch::autograd::AccumulateGrad",
    ]
    assert backward.runs == 1
    text = str(report)
    assert "backward of 4 node calls, run 1 times, backend eager" in text
    assert "1 x tensor hook" in text


def test_explain_without_a_function_tells_of_the_whole_process() -> None:
    w = leaf()
    for backend in ("eager", "aten"):
        with retrograd.compiled_autograd(backend):
            w.sin().sum().backward()
    assert [backward.backend for backward in retrograd.explain().backwards] == ["eager", "aten"]
    retrograd.reset()
    assert str(retrograd.explain()) == "nothing was captured"


def test_the_process_report_is_bounded_by_its_structures() -> None:
    w = leaf()
    for _ in range(5):
        w.grad = None
        with retrograd.compiled_autograd("eager"):
            w.sin().sum().backward()
    (backward,) = retrograd.explain().backwards
    assert backward.runs == 5


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "3.0", "unknown"])
def test_an_unsupported_torch_is_one_clear_error(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    probe.check_supported.cache_clear()
    with pytest.raises(retrograd.UnsupportedTorchError, match=f"torch {version} is not supported"):
        with retrograd.compiled_autograd("eager"):
            pass
    probe.check_supported.cache_clear()


def test_a_missing_private_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe.REQUIRED, "torch._C", ("_no_such_name",))
    assert probe.missing_names() == ("torch._C._no_such_name",)
    probe.check_supported.cache_clear()
    with pytest.raises(retrograd.UnsupportedTorchError, match=r"missing  torch\._C\._no_such_name"):
        probe.check_supported()
    probe.check_supported.cache_clear()


def test_the_installed_torch_is_supported() -> None:
    probe.check_supported.cache_clear()
    probe.check_supported()
    assert probe.missing_names() == ()
