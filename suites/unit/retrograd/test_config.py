"""Options: checked when they are given, with one error for all, that says what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import retrograd
from retrograd import OptionError, aot
from retrograd.config import Config

WRONG: dict[str, list[Any]] = {
    "backend": [3, None, "fast", ["eager"]],
    "backward": [3, "fast"],
    "partitioner": [3, None, "most"],
    "passes": [3, "remove_dead_code", [3], ["no_such_pass"]],
    "dynamic": ["yes", 1, 0],
    "strict": ["no", 1, None],
    "recompile_limit": [0, -1, True, 2.0, "8"],
    "cache_size": [0, True, None],
    "opaque": ["MulBackward0", [3], 3],
    "regions": ["all", -1, 2.0, None],
    "single_region": ["no", None],
    "background": ["yes", None],
    "cudagraphs": ["off", 1, None],
    "compile_timeout": ["1", -1, True],
    "whole_after": [0, 1, True, 2.0, "8"],
    "stock_dynamo": ["yes", 1, None],
}


def on_dynamo(**options: Any) -> Any:
    compiled = torch.compile(lambda x: x.sin(), backend="retrograd", options=options)
    return compiled(torch.ones(2, requires_grad=True))


def identity(x: Any) -> Any:
    return x


DOORS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "compiled_autograd": (
        retrograd.compiled_autograd,
        (
            "backend",
            "strict",
            "dynamic",
            "recompile_limit",
            "opaque",
            "regions",
            "background",
            "cudagraphs",
            "compile_timeout",
        ),
    ),
    "enable": (
        retrograd.enable,
        ("backend", "strict", "dynamic", "opaque", "regions", "compile_timeout"),
    ),
    "compile": (lambda **given: retrograd.compile(identity, **given), ("backend", "dynamic")),
    "compile, options": (
        lambda **given: retrograd.compile(identity, options=given),
        (
            "backward",
            "partitioner",
            "passes",
            "strict",
            "regions",
            "single_region",
            "cudagraphs",
            "compile_timeout",
            "whole_after",
        ),
    ),
    "compile_step": (
        lambda **given: retrograd.compile_step(identity, **given),
        (
            *("backend", "strict", "dynamic", "recompile_limit", "regions", "cudagraphs", "compile_timeout"),
            *("stock_dynamo", "whole_after"),
        ),
    ),
    "aot.function": (
        lambda **given: aot.function(identity, **given),
        tuple(name for name in WRONG if name not in ("opaque", "background", "stock_dynamo")),
    ),
    "aot.module": (
        lambda **given: aot.module(torch.nn.ReLU(), **given),
        tuple(name for name in WRONG if name not in ("opaque", "background", "stock_dynamo")),
    ),
    "backend": (on_dynamo, ("partitioner", "passes", "strict", "regions", "single_region", "cudagraphs")),
}


@pytest.mark.parametrize(
    ("door", "name", "value"),
    [(door, name, value) for door, (_, names) in DOORS.items() for name in names for value in WRONG[name]],
    ids=str,
)
def test_a_value_that_is_not_allowed_is_refused(door: str, name: str, value: Any) -> None:
    torch._dynamo.reset()
    with pytest.raises((OptionError, torch._dynamo.exc.BackendCompilerFailed)) as refused:
        DOORS[door][0](**{name: value})
    assert f"option '{name}': " in str(refused.value)
    assert "expected" in str(refused.value)


def test_the_text_says_what_was_found_and_what_is_allowed() -> None:
    with pytest.raises(OptionError) as refused:
        retrograd.compiled_autograd(backend="fast")
    assert str(refused.value) == (
        "option 'backend': got 'fast'\n"
        "  expected  one of aten, eager, inductor, or a callable (gm, example_inputs) -> callable"
    )
    with pytest.raises(OptionError) as refused:
        retrograd.compiled_autograd("eager", dynamic="yes")
    assert str(refused.value) == "option 'dynamic': got 'yes'\n  expected  None, True or False"


def test_every_option_has_a_rule() -> None:
    assert set(WRONG) == {name for name in Config.__dataclass_fields__ if not name.startswith("_")}


def test_what_is_not_a_function_is_refused() -> None:
    for make in (retrograd.compile_step, aot.function):
        with pytest.raises(OptionError, match="got 3"):
            make(3)


def test_configs_are_values() -> None:
    def backend(gm: Any, inputs: Any) -> Any:
        return gm.forward

    assert Config(backend=backend) == Config(backend=backend)
    assert Config(backend=backend) != Config(backend="eager")
    assert hash(Config(opaque=frozenset({"A"}))) == hash(Config(opaque=frozenset({"A"})))
    assert Config(opaque=["A"]).opaque == frozenset({"A"})  # type: ignore[arg-type]
