"""A graph in which numbers are tensors.

In: a graph of ATen operators with placeholders that are numbers. Out: the graph traced again, with a tensor
of float64 without dimensions for each of them: `x + alpha * y` where `add` took `alpha`. Values are the same
up to rounding; types are those of the graph before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd._torch.joint_tracing import decomposed

__all__ = ["UnknownNumberError", "with_number_tensors"]

_FOREACH = "_foreach_"


class UnknownNumberError(Exception):
    """An operator takes a number, and it is not known how it would take a tensor."""


def with_number_tensors(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    fake_mode: FakeTensorMode,
    table: Mapping[Any, Callable[..., Any]],
) -> tuple[fx.GraphModule, list[Any]]:
    """`gm` with tensors for numbers, and its examples.

    Args:
        gm: the graph. examples: of its placeholders; symbolic floats become tensors.
        table: decompositions to apply.

    Raises:
        UnknownNumberError: an operator is not known.
    """
    with fake_mode:
        inputs = [
            torch.empty((), dtype=torch.float64) if isinstance(example, torch.SymFloat) else example
            for example in examples
        ]
    numbers = {id(value) for value, example in zip(inputs, examples, strict=True) if value is not example}

    def run(*args: Any) -> Any:
        places = [place for place, value in enumerate(inputs) if id(value) in numbers]
        return _Numbers(gm, {id(args[place]) for place in places}).run(*args)

    return decomposed(run, inputs, fake_mode, table), inputs  # type: ignore[arg-type]


class _Numbers(fx.Interpreter):
    """Calls operators with tensors where they had numbers; `numbers` are ids of such tensors."""

    def __init__(self, gm: fx.GraphModule, numbers: set[int]) -> None:
        super().__init__(gm)
        self._numbers = numbers

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return _as_before(result, n.meta.get("val")) if n.op == "call_function" else result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, torch._ops.OpOverload) or not self._has_number((args, kwargs)):
            return super().call_function(target, args, kwargs)
        name = target._schema.name.split("::")[-1]
        names = [argument.name for argument in target._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if name.startswith(_FOREACH):
            return _each(name.removeprefix(_FOREACH), given)
        return _call(name, list(given.values()), given)

    def _has_number(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(self._has_number, value))
        if isinstance(value, dict):
            return any(map(self._has_number, value.values()))
        return id(value) in self._numbers


def _each(name: str, given: Mapping[str, Any]) -> list[Any]:
    """A ``_foreach`` operator, one tensor at a time."""
    first, *others = given.values()
    keys = list(given)[1:]
    results = []
    for place in range(len(first)):
        one = [first[place], *[v[place] if isinstance(v, (list, tuple)) else v for v in others]]
        results.append(_call(name, one, dict(zip(["self", *keys], one, strict=True))))
    return results


def _call(name: str, values: list[Any], given: Mapping[str, Any]) -> Any:
    match name, values:
        case "add", [x, y, *_]:
            return x + y * given.get("alpha", 1)
        case "sub", [x, y, *_]:
            return x - y * given.get("alpha", 1)
        case "rsub", [x, y, *_]:
            return y - x * given.get("alpha", 1)
        case "mul", [x, y]:
            return x * y
        case "div", [x, y]:
            return x / y
        case "pow", [x, y]:
            return x**y
        case "addcdiv", [x, a, b, value]:
            return x + (a / b) * value
        case "addcmul", [x, a, b, value]:
            return x + a * b * value
        case "lerp", [x, end, weight]:
            return x + (end - x) * weight
        case "maximum" | "clamp_min", [x, y]:
            return torch.maximum(x, torch.as_tensor(y, dtype=x.dtype, device=x.device))
        case _:
            raise UnknownNumberError(f"{name} with a number that changes")


def _as_before(result: Any, before: Any) -> Any:
    """`result` in the types of `before`."""
    if isinstance(result, (tuple, list)):
        return type(result)(map(_as_before, result, before))
    if isinstance(result, torch.Tensor) and isinstance(before, torch.Tensor) and result.dtype != before.dtype:
        return result.to(before.dtype)
    return result
