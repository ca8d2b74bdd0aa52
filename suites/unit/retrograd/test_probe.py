"""A torch is judged by what it can do: what is missing is named, what no test has seen is said once."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.compiled_autograd import AutogradCompilerInstance

import retrograd
from retrograd import probe
from unit.retrograd.programs import leaf


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    probe.check_supported.cache_clear()
    yield
    probe.check_supported.cache_clear()


def captured_runs() -> int:
    with retrograd.compiled_autograd("eager"):
        leaf().sin().sum().backward()
    return retrograd.explain().backwards[0].runs


def refusal() -> str:
    with pytest.raises(retrograd.UnsupportedTorchError) as caught, retrograd.compiled_autograd("eager"):
        pass
    return str(caught.value)


def test_the_installed_torch_has_everything() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe.check_supported()
    assert [*probe.missing_names(), *probe.unlike_calls()] == []
    assert [*probe.unlike_backward(), *probe.unused_entrances()] == []


def test_an_entrance_that_torch_no_longer_uses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setitem(probe._ENTRANCES, "torch.cuda:set_stream", torch.sin)
    assert "missing  torch.cuda.set_stream where it was" in refusal()


@pytest.mark.parametrize("version", ["2.99.0", "3.0", "2.16.0a0+git1234", "2.1.0"])
def test_a_release_that_has_everything_runs_with_one_warning(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning, match="is untested with retrograd") as given:
        runs = captured_runs(), captured_runs()
    assert (runs, len(given), given[0].filename) == ((1, 2), 1, __file__)


def test_a_missing_private_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe.REQUIRED, "torch:_C.", "_set_grad_enabled _no_such_name")
    assert list(probe.missing_names()) == ["torch._C._no_such_name"]
    assert f"torch {torch.__version__} is not supported" in refusal()


def test_a_missing_name_that_we_replace_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TABLE", {"torch.cuda:no_such_function": {"why": "for this test"}})
    assert "missing  torch.cuda.no_such_function" in refusal()


def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe.REQUIRED, "torch.no_such_module:", "anything")
    assert "missing  torch.no_such_module.anything" in refusal()


def test_a_call_with_other_arguments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def pre_hook(self: Any, grads: Any, hook: int, more: int) -> Any: ...

    monkeypatch.setattr(AutogradCompilerInstance, "pre_hook", pre_hook)
    assert "missing  AutogradCompilerInstance.pre_hook as it was (too many" in refusal()


def test_an_engine_that_says_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_capture(self: Any, *_: Any) -> Any:
        raise TypeError("begin_capture() takes another argument")

    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(probe.EngineProtocol, "begin_capture", begin_capture)
    assert "missing  the engine's protocol as it was (TypeError: begin_capture() takes another" in refusal()


def test_what_cannot_be_imported_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        if name == "retrograd.api":
            raise ImportError("cannot import name 'gone' from 'torch._dynamo'", name="torch._dynamo")
        return sys.modules[name]

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(retrograd.errors.UnsupportedTorchError, match="missing  cannot import name 'gone'"):
        retrograd.compiled_autograd  # noqa: B018
