"""Functions that say something of themselves to autograd, or do in their backward what a trace may lose.

In: nothing. Out: the classes, and `APPLIED`: what each makes of a tensor, as two outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class Marked(torch.autograd.Function):
    """A tensor and a mask, which is marked as not differentiable."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return x * mask, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor | None) -> Tensor:
        (mask,) = ctx.saved_tensors
        return grad * mask * 2 + (100 if other is None else other.sum())


class MarkedAlone(torch.autograd.Function):
    """One output, which is marked as not differentiable."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        y = x.round()
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


class Undefined(torch.autograd.Function):
    """Two outputs; a gradient that does not arrive is None."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if first is None:
            return None if second is None else second * 5
        return first * 2 if second is None else first * 2 + second * 3 + 100


class UndefinedBySetup(Undefined):
    """The same, said in `setup_context`."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)


class Zeros(torch.autograd.Function):
    """Two outputs; a gradient that does not arrive is zeros."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first * 2 + second * 3 + first.stride(0)


class Counting(torch.autograd.Function):
    """A Function that writes on its context in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.runs = 0
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.runs += 1
        return grad * ctx.runs


class Short(torch.autograd.Function):
    """A backward that returns too few gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Long(torch.autograd.Function):
    """A backward that returns too many gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * 2, grad


class Narrow(torch.autograd.Function):
    """A backward that returns a gradient of a shape that does not fit."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad[..., :2] * 2


class Wide(torch.autograd.Function):
    """A backward that returns a gradient which the engine sums to the input's shape."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(3, *grad.shape) * 2


class Number(torch.autograd.Function):
    """A backward that returns a number instead of a tensor."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> float:
        return 3.0


class WritesGradient(torch.autograd.Function):
    """A backward that changes a copy of its gradient in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone().mul_(3)


class InPlace(torch.autograd.Function):
    """A Function that changes what it is given, and says so."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5


class Reversed(torch.autograd.Function):
    """A Function that returns what it is given."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Viewed(torch.autograd.Function):
    """A Function that returns a view of what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad.view(ctx.shape)


class Square(torch.autograd.Function):
    """A square, whose second derivative goes through what it has saved."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * 3


class SquareBySetup(Square):
    """The same with `setup_context`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class Exponential(torch.autograd.Function):
    """An exponential that saves its output."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


class KeepsOutput(torch.autograd.Function):
    """A Function that keeps its output as an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x.sin()
        ctx.out = x * 2
        return ctx.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.kept * ctx.out


class Nested(torch.autograd.Function):
    """A backward that applies another Function to its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Square.apply(grad)


class OnceOnly(torch.autograd.Function):
    """A Function that can be differentiated once."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * 2


class Differentiates(torch.autograd.Function):
    """A backward that runs a backward of its own."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((again.sin() * again).sum(), again)
        return grad * slope


class Raises(torch.autograd.Function):
    """A backward that raises an error of the user's."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("there is no gradient of this")


#: what is applied, to a tensor that has a history.
APPLIED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "marked": lambda x: Marked.apply(x),
    "marked_alone": lambda x: (x * 2, MarkedAlone.apply(x)),
    "undefined": lambda x: Undefined.apply(x),
    "undefined_by_setup": lambda x: UndefinedBySetup.apply(x),
    "zeros": lambda x: Zeros.apply(x),
    "counting": lambda x: (Counting.apply(x), x * 1),
    "too_few": lambda x: (Short.apply(x, x * 2), x * 1),
    "too_many": lambda x: (Long.apply(x), x * 1),
    "too_narrow": lambda x: (Narrow.apply(x), x * 1),
    "wider": lambda x: (Wide.apply(x), x * 1),
    "a_number": lambda x: (Number.apply(x), x * 1),
    "writes_gradient": lambda x: (WritesGradient.apply(x), x * 1),
    "in_place": lambda x: (InPlace.apply(x * 1), x * 1),
    "returned_input": lambda x: (Reversed.apply(x), x * 1),
    "returned_view": lambda x: (Viewed.apply(x).view(x.shape), x * 1),
    "square": lambda x: (Square.apply(x), x * 1),
    "square_by_setup": lambda x: (SquareBySetup.apply(x), x * 1),
    "exponential": lambda x: (Exponential.apply(x), x * 1),
    "keeps_output": lambda x: (KeepsOutput.apply(x), x * 1),
    "nested": lambda x: (Nested.apply(x), x * 1),
    "once_only": lambda x: (OnceOnly.apply(x), x * 1),
    "differentiates": lambda x: (Differentiates.apply(x), x * 1),
    "raises": lambda x: (Raises.apply(x), x * 1),
}
