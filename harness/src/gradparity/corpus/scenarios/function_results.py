"""What a custom Function's backward must not return, and what is made of what it may return.

In: a probe. Out: the type and text of every error, and the gradients that are accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("function", "errors"))
def function_with_backward_and_vjp(p: Probe) -> None:
    """Defining both `backward` and `vjp` is a RuntimeError in the backward."""

    class Both(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

        @staticmethod
        def vjp(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        Both.apply(x).sum().backward()


@scenario(tags=("function", "errors"))
def function_without_a_backward(p: Probe) -> None:
    """A Function without `backward` is a NotImplementedError in the backward."""

    class Forward(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        Forward.apply(x).sum().backward()


def _returning(result: Any) -> type[Function]:
    """A Function whose backward returns `result(grad)`."""

    class Returning(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            return args[0] * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return result(grad)

    return Returning


@scenario(tags=("function",))
def results_that_are_refused(p: Probe) -> None:
    """Backward results that are refused, each with its own error: a list, a number, another size."""
    results = {
        "list": lambda g: [g],
        "number": lambda g: 1.0,
        "string": lambda g: "gradient",
        "nested": lambda g: ((g,),),
        "shape": lambda g: g.new_zeros(7),
        "complex": lambda g: g.to(torch.complex64),
        "integer": lambda g: g.to(torch.int64),
        "nothing": lambda g: (),
    }
    for name, result in results.items():
        x = p.leaf(name, p.randn(3, requires_grad=True))
        try:
            with p.backward():
                _returning(result).apply(x.sin()).sum().backward()
        except Exception as error:
            p.event(name, type(error).__name__, str(error))


@scenario(tags=("function",))
def gradient_for_an_argument_that_is_no_tensor(p: Probe) -> None:
    """A gradient for a non-tensor argument is refused; one for a tensor that needs none is dropped."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        _returning(lambda g: (g, g)).apply(x.sin(), p.randn(3)).sum().backward()
        try:
            _returning(lambda g: (g, g)).apply(x.sin(), 3.0).sum().backward()
        except RuntimeError as error:
            p.event("error", str(error))


@scenario(tags=("function", "views"))
def gradients_expanded_to_fit(p: Probe) -> None:
    """A gradient of a smaller shape that broadcasts, and zero-dimensional ones."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    for name, result in {"scalar": lambda g: g.sum(), "row": lambda g: g.sum(0)}.items():
        try:
            with p.backward():
                _returning(result).apply(x.sin()).sum().backward()
        except RuntimeError as error:
            p.event(name, str(error))
