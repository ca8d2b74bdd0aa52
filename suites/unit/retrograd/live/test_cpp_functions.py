"""Autograd functions and hooks written in C++: opaque calls, or part of a segment if they are traceable.

One small extension is built for all tests. Torch locks the folder where it builds and keeps what it built;
that folder is the same for all releases of torch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

import retrograd

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("cpp_functions")]


@pytest.fixture(scope="module")
def cpp() -> Any:
    """The operators of the extension."""
    source = Path(__file__).with_name("cpp_functions.cpp")
    name = f"retrograd_test_functions_{re.sub(r'[^0-9a-z]', '_', torch.__version__)}"
    cpp_extension.load(name, [str(source)], is_python_module=False, extra_cflags=["-O0"])
    return torch.ops.retrograd_tests


Program = Callable[[Any, Tensor, Tensor, list[str]], None]


def outcome(
    cpp: Any, program: Program, context: contextlib.AbstractContextManager[object]
) -> SimpleNamespace:
    """The gradients, events and error of a program."""
    x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    y = torch.tensor([1.5, 0.25, -3.0], requires_grad=True)
    events: list[str] = []
    error = None
    with context:
        try:
            program(cpp, x, y, events)
        except Exception as raised:
            error = (type(raised), str(raised).splitlines()[0])
    return SimpleNamespace(grads=(x.grad, y.grad), events=events, error=error)


def product(traceable: bool) -> Program:
    def program(cpp: Any, x: Tensor, y: Tensor, events: list[str]) -> None:
        for factor in (2.0, 3.0):
            z = cpp.product(x.sin(), y, factor, traceable)
            z.register_hook(lambda grad: events.append(f"z {grad.tolist()}"))
            (z.exp() * x).sum().backward()

    return program


def undefined(materialize: bool) -> Program:
    def program(cpp: Any, x: Tensor, y: Tensor, events: list[str]) -> None:
        first, second = cpp.two_outputs(x * 1, materialize)
        first.sum().backward(retain_graph=True)
        (second * y).sum().backward()
        first, second = cpp.two_outputs(x * 1, materialize)
        (first.sum() + cpp.vanish(second).sum()).backward()

    return program


def hooks(cpp: Any, x: Tensor, y: Tensor, events: list[str]) -> None:
    z = x * y
    z.register_hook(lambda grad: events.append(f"before {grad.tolist()}"))
    cpp.scale_gradient(z, 5.0)
    z.register_hook(lambda grad: events.append(f"after {grad.tolist()}"))
    cpp.scale_gradient(x, 2.0)
    z.sin().sum().backward()


def counting(cpp: Any, x: Tensor, y: Tensor, events: list[str]) -> None:
    z = cpp.counting(x.sin(), y)
    for _ in range(3):
        z.sum().backward(retain_graph=True)
    cpp.counting(x.sin(), y.detach()).sum().backward()
    z.sum().backward(inputs=[x])


def hooks_and_state(cpp: Any, x: Tensor, y: Tensor, events: list[str]) -> None:
    z = cpp.counting(x.sin(), y)
    cpp.scale_gradient(z, 5.0)
    for _ in range(3):
        z.sum().backward(retain_graph=True)


def refuse(cpp: Any, x: Tensor, y: Tensor, events: list[str]) -> None:
    (cpp.refuse(x.sin()) * y).sum().backward()


def twice(cpp: Any, x: Tensor, y: Tensor, events: list[str]) -> None:
    (first,) = torch.autograd.grad(cpp.product(x, y, 2.0, True).pow(2).sum(), x, create_graph=True)
    (first * first).sum().backward()


PROGRAMS = {
    "traceable": product(True),
    "not traceable": product(False),
    "undefined as zeros": undefined(True),
    "undefined as undefined": undefined(False),
    "hooks": hooks,
    "state": counting,
    "hooks and state": hooks_and_state,
    "error": refuse,
    "differentiated twice": twice,
}


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_as_eager(cpp: Any, name: str, backend: str) -> None:
    eager = outcome(cpp, PROGRAMS[name], contextlib.nullcontext())
    ours = outcome(cpp, PROGRAMS[name], retrograd.compiled_autograd(backend))
    assert (ours.events, ours.error) == (eager.events, eager.error)
    for one, other in zip(ours.grads, eager.grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if backend == "eager" else 1e-6)


def test_a_traceable_function_is_part_of_a_segment(cpp: Any) -> None:
    for traceable, calls in ((True, 0), (False, 1)):
        context = retrograd.compiled_autograd("aten", strict=True)
        x, y = torch.ones(3, requires_grad=True), torch.ones(3)
        with context:
            cpp.product(x.sin(), y, 2.0, traceable).exp().sum().backward()
        assert len(context.explain().backwards[0].schedule.opaque_calls) == calls
        assert {low.how for low in context.explain().backwards[0].lowerings} == {"aten"}


def test_state_that_could_be_lost_is_a_reason(cpp: Any) -> None:
    context = retrograd.compiled_autograd("aten")
    with pytest.warns(retrograd.FallbackWarning, match="may keep state"):
        outcome(cpp, counting, context)
    assert [reason.code for reason in context.explain().fallbacks] == ["cpp-function-kept"]
