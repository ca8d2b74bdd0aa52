"""Tensors that eager saves and its formula does not read, changed in place before the backward.

In: a probe, whose `compile` is the identity for eager. Out: eager's RuntimeError where its node has saved
what was changed, though no gradient depends on its elements, and else gradients. One scenario for each
operator and each change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "in-place")


class Doubled(torch.autograd.Function):
    """Doubles, and asks for what it has saved, which it does not need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * 2
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return grad * 2


class Tripled(torch.autograd.Function):
    """Triples, and does not ask for what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * 3
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0] * x.shape[1], device=x.device).view(x.shape) % x.shape[0]


def _image(x: Tensor) -> Tensor:
    return x.view(1, 1, *x.shape)


def _classes(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)


#: what eager saves, and an operator of a matrix and of a vector as long as its rows.
OPERATORS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "index_reduce_mean": (
        "matrix vector result",
        lambda x, v: torch.index_reduce(v, 0, _classes(x), x[:, 0], "mean"),
    ),
    "scatter_reduce_sum": (
        "matrix result",
        lambda x, v: torch.scatter_reduce(x, 0, _rows(x), x.detach(), "sum"),
    ),
    "scatter_reduce_mean": (
        "matrix result",
        lambda x, v: torch.scatter_reduce(x, 0, _rows(x), x.detach(), "mean"),
    ),
    "vector_norm_of_order_0": ("matrix result", lambda x, v: torch.linalg.vector_norm(x, 0, dim=1)),
    "vector_norm_of_order_1": ("matrix result", lambda x, v: torch.linalg.vector_norm(x, 1, dim=1)),
    "vector_norm_of_order_2": ("matrix result", lambda x, v: torch.linalg.vector_norm(x, 2, dim=1)),
    "prod_of_a_dimension": ("matrix result", lambda x, v: x[:, :1].prod(1)),
    "sgn": ("matrix result", lambda x, v: x.sgn()),
    "sign": ("vector", lambda x, v: x.sign() * v),
    "svdvals": ("result", lambda x, v: torch.linalg.svdvals(x)),
    "std_mean": ("matrix result", lambda x, v: torch.std_mean(x, 1)[0]),
    "layer_norm": ("matrix vector", lambda x, v: functional.layer_norm(x, v.shape, v, v + 1)),
    "layer_norm_with_a_bias": ("matrix vector", lambda x, v: functional.layer_norm(x, v.shape, None, v)),
    "group_norm": ("matrix vector", lambda x, v: functional.group_norm(x, 1, v, v)),
    "batch_norm_in_evaluation": (
        "matrix vector",
        lambda x, v: functional.batch_norm(x, v.detach(), v.detach() ** 2, None, v),
    ),
    "max_pool2d": ("matrix", lambda x, v: functional.max_pool2d(_image(x), 2, 1)),
    "avg_pool2d": ("matrix", lambda x, v: functional.avg_pool2d(_image(x), 2, 1)),
    "adaptive_avg_pool2d": ("matrix", lambda x, v: functional.adaptive_avg_pool2d(_image(x), 2)),
    "reflection_pad1d": ("matrix", lambda x, v: functional.pad(x, (1, 1), "reflect")),
    "nll_loss": ("matrix", lambda x, v: functional.nll_loss(x, _classes(x), reduction="none")),
    "pow_of_one": ("matrix", lambda x, v: x.pow(1.0)),
    "pow_of_a_tensor": ("vector result", lambda x, v: x.exp().pow(v.detach())),
    "clamp": ("matrix", lambda x, v: x.clamp(-1, 1)),
    "cumsum": ("", lambda x, v: x.cumsum(1) + v),
    "amax": ("matrix result", lambda x, v: x.amax(1)),
    "sort": ("", lambda x, v: x.sort(1).values),
    "logcumsumexp": ("matrix result", lambda x, v: x.logcumsumexp(1)),
    "renorm": ("matrix", lambda x, v: x.renorm(2, 0, 1.0)),
    "mul": ("matrix vector", lambda x, v: x * v),
    "function_that_asks": ("matrix result", lambda x, v: Doubled.apply(x)),
    "function_that_does_not_ask": ("", lambda x, v: Tripled.apply(x)),
}

CHANGED = ("matrix", "vector", "result")


def _register(operator: str, changed: str) -> None:
    saved, function = OPERATORS[operator]

    def body(p: Probe) -> None:
        x = p.leaf("x", p.randn(4, 4, requires_grad=True))
        v = p.leaf("v", p.randn(4, requires_grad=True))
        matrix, vector = x * 2, v * 2
        out = p.compile(function)(matrix, vector)
        loss = out.sum() + matrix.sum() + vector.sum()
        with torch.no_grad():
            {"matrix": matrix, "vector": vector, "result": out}[changed].add_(1)
        with p.backward():
            loss.backward()

    body.__name__ = f"{changed}_changed_after_{operator}"
    text = f"The {changed} is changed in place between {operator} and its backward; eager may have saved it."
    body.__doc__ = text.replace("_", " ")
    scenario(tags=(*TAGS, "errors") if changed in saved else TAGS)(body)


for _operator in OPERATORS:
    for _changed in CHANGED:
        _register(_operator, _changed)
