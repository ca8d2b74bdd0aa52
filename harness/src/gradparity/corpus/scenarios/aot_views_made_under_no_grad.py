"""Functions compiled ahead that compute with a view made under `no_grad`.

In: a probe, whose `compile` is the identity for eager. Out: results, whether they require grad, and the
gradient of the function's input. Eager makes such a view a leaf of its own if its base requires grad, so what
is computed of it requires grad, and none of that gradient comes to the input. One scenario for each view and
each way in which results are made of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "no-grad")

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x[0],
    "reshaped": lambda x: x.view(-1, 1),
    "transposed": lambda x: x.transpose(0, 1),
    "first_part": lambda x: x.split(1)[0],
    "unpacked": lambda x: next(iter(x)),
}
Several = tuple[Tensor, ...]


def _one_result(v: Tensor, x: Tensor) -> Several:
    return (v * 2, x.sum() * 3)


def _a_value_in_two_results(v: Tensor, x: Tensor) -> Several:
    w = v * 2
    return w + 1, w * w


def _a_value_in_one_result_and_beside(v: Tensor, x: Tensor) -> Several:
    w = v * 2
    u = w * w
    return u + 1, u.sum() * x, w.sum() + x


def _a_value_beside_the_input(v: Tensor, x: Tensor) -> Several:
    w = v * 2
    return w.sum() * x, w.square().sum() + x * x


RESULTS: dict[str, Callable[[Tensor, Tensor], Several]] = {
    "one_result": _one_result,
    "a_value_in_two_results": _a_value_in_two_results,
    "a_value_in_one_result_and_beside": _a_value_in_one_result_and_beside,
    "a_value_beside_the_input": _a_value_beside_the_input,
}


def _register(view: str, results: str) -> None:
    def function(x: Tensor) -> Several:
        with torch.no_grad():
            v = VIEWS[view](x)
        return RESULTS[results](v, x)

    def body(p: Probe) -> None:
        x = p.leaf("x", (torch.arange(6) - 2).reshape(2, 3).to(p.dtype).requires_grad_())
        outputs = p.compile(function)(x)
        for number, out in enumerate(outputs):
            p.value(f"result {number}", out)
        with p.backward():
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])

    body.__name__ = f"aot_{view}_under_no_grad_{results}"
    body.__doc__ = f"The {view} view of an input, made under no_grad: {results}.".replace("_", " ")
    scenario(tags=TAGS)(body)


for _view in VIEWS:
    for _results in RESULTS:
        _register(_view, _results)
