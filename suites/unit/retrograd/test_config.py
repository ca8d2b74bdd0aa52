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
    "backend": [3, None, "fast", ["eager"], torch.nn.Linear(2, 2)],
    "backward": [3, "fast", torch.nn.Linear(2, 2)],
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


def test_the_name_for_torch_compile_is_explained_as_a_backend() -> None:
    with pytest.raises(OptionError, match="'retrograd', a name for"):
        retrograd.compile(torch.sin, backend="retrograd")


@pytest.mark.parametrize("door", [*DOORS, "Config"])
def test_an_unknown_option_is_refused_with_those_that_there_are(door: str) -> None:
    of_dynamo = door in ("backend", "compile, options")
    known = "partitioner" if of_dynamo else "fullgraph" if door == "compile" else "regions"
    make = Config if door == "Config" else DOORS[door][0]
    torch._dynamo.reset()
    with pytest.raises((OptionError, torch._dynamo.exc.BackendCompilerFailed)) as refused:
        make(**{known[:-2]: True})
    assert f"option '{known[:-2]}': there is no such option; did you mean '{known}'?\n" in str(refused.value)
    assert known in str(refused.value).partition("expected  one of ")[2]
    assert door == "backend" or isinstance(refused.value, TypeError)


def joint() -> Any:
    return aot.capture(aot.create_state(torch.sin, (torch.ones(2, requires_grad=True),)))


def used_without_parentheses() -> Any:
    return retrograd.compiled_autograd(identity)(torch.ones(2))


#: by what is called: the call, the argument that does not fit, what was found, what is expected.
ARGUMENTS: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "compile": (lambda: retrograd.compile("model"), "target", "'model'", "a module, or a function"),
    "compile_step": (lambda: retrograd.compile_step(3), "step", "3", "a training step"),
    "compile_step()": (lambda: retrograd.compile_step()("f"), "fn", "'f'", "a training step"),
    "explain": (lambda: retrograd.explain(3), "fn", "3", "a function that runs backwards"),
    "compiled_autograd": (used_without_parentheses, "fn", "Tensor", "parentheses"),
    "CompiledAutograd": (lambda: retrograd.CompiledAutograd(3), "config", "3", "a retrograd.Config"),
    "CompiledStep": (lambda: retrograd.CompiledStep(identity, None), "config", "None", "a retrograd.Config"),
    "AotFunction": (lambda: aot.AotFunction(3, Config()), "fn", "3", "a function"),
    "function": (lambda: aot.function(3), "fn", "3", "a function"),
    "module": (lambda: aot.module(identity), "mod", "function", "aot.function takes functions"),
    "create_state": (lambda: aot.create_state("f"), "fn_or_module", "'f'", "a function or a module"),
    "create_state, args": (lambda: aot.create_state(identity, torch.ones(2)), "args", "Tensor", "(x,)"),
    "create_state, kwargs": (lambda: aot.create_state(identity, (), 3), "kwargs", "3", "by name"),
    "create_state, dynamic": (
        lambda: aot.create_state(identity, dynamic="yes"), "dynamic", "'yes'", "True, False",
    ),
    "capture": (lambda: aot.capture(identity), "state", "function", "aot.create_state"),
    "capture, switch": (
        lambda: aot.capture(aot.create_state(identity), single_region="no"), "single_region", "'no'", "True",
    ),
    "partition": (lambda: aot.partition(None), "joint", "None", "aot.capture"),
    "aot.compile": (lambda: aot.compile(joint()), "partition", "JointGraph", "aot.partition"),
    "aot.compile, forward": (
        lambda: aot.compile(aot.partition(joint()), "fast"), "forward", "'fast'", "one of aten, eager",
    ),
    "aot.compile, backward": (
        lambda: aot.compile(aot.partition(joint()), "eager", "fast"), "backward", "'fast'", "one of aten",
    ),
    "with_state": (
        lambda: aot.compile(aot.partition(joint()), "eager").with_state(3), "state", "3", "state_dict",
    ),
    "export": (lambda: aot.export(3, "file"), "joint", "3", "aot.capture"),
    "export, file": (lambda: aot.export(joint(), None), "file", "None", "a path, or an open binary file"),
    "load": (lambda: aot.load(3), "file", "3", "a path, or an open binary file"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_another_kind_is_refused(name: str) -> None:
    call, argument, found, expected = ARGUMENTS[name]
    with pytest.raises(OptionError) as refused:
        call()
    assert str(refused.value).startswith(f"option '{argument}': got {found}\n  expected  ")
    assert expected in str(refused.value)


def test_a_strict_error_does_not_advise_what_strict_rules_out() -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    loss = torch.ones(2, requires_grad=True).sin().sum()
    with retrograd.compiled_autograd(fails, strict=True), pytest.raises(retrograd.LoweringError) as refused:
        loss.backward()
    assert refused.value.reason.node == "SumBackward0, SinBackward0"  # what opaque= takes
    assert str(refused.value).startswith("segment 0 cannot be compiled: ZeroDivisionError")
    assert refused.value.reason.way_out == (
        "name the node in opaque=, or do nothing: outside strict mode, only this segment is not compiled"
    )


def test_every_option_has_a_rule() -> None:
    assert set(WRONG) == {name for name in Config.__dataclass_fields__ if not name.startswith("_")}


def test_configs_are_values() -> None:
    def backend(gm: Any, inputs: Any) -> Any:
        return gm.forward

    assert Config(backend=backend) == Config(backend=backend)
    assert Config(backend=backend) != Config(backend="eager")
    assert hash(Config(opaque=frozenset({"A"}))) == hash(Config(opaque=frozenset({"A"})))
    assert Config(opaque=["A"]).opaque == frozenset({"A"})  # type: ignore[arg-type]
