"""One training program, run eagerly and as a compiled step, compared call by call.

In: a function that builds the program anew. Out: the compiled step, for what a test wants to ask of it; an
`AssertionError` where parameters, states, buffers, gradients, results or events differ in any bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import retrograd
from retrograd import CompiledStep


@dataclass
class Program:
    """`step` is called with each of `calls`; before call i, ``before(i)`` runs."""

    step: Callable[..., Any]
    calls: Sequence[tuple[Any, ...]]
    modules: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    tensors: Sequence[torch.Tensor] = ()
    events: list[Any] = field(default_factory=list)
    before: Callable[[int], None] = lambda i: None


def run_twins(build: Callable[[], Program], **options: Any) -> CompiledStep:
    """Run the program both ways; everything must be equal after each call."""
    options = {"backend": "eager", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", retrograd.FallbackWarning)
        eager = list(_observed(build, lambda fn: fn))
        compiled: list[CompiledStep] = []

        def compile_it(fn: Callable[..., Any]) -> Callable[..., Any]:
            compiled.append(retrograd.compile_step(fn, **options))
            return compiled[0]

        for call, (expected, got) in enumerate(zip(eager, _observed(build, compile_it), strict=True)):
            assert got == expected, (
                f"call {call}: {_first_difference(expected, got)}\n{compiled[0].explain()}"
            )
    return compiled[0]


def assert_compiled(step: CompiledStep) -> None:
    """Nothing ran as eager runs it: Dynamo's graphs have code, and the live path ran the backwards."""
    report = step.explain()
    assert report.compiled > 0, report
    assert not report.pieces.fallbacks, report
    assert report.pieces.graphs, report


def _observed(build: Callable[[], Program], compiled: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    program = build()
    step = compiled(program.step)
    torch.manual_seed(1)
    for number, call in enumerate(program.calls):
        program.before(number)
        try:
            result: Any = step(*call)
        except Exception as error:
            result = (type(error).__name__, str(error))
        yield {"result": _seen(result), **_state(program), "events": list(program.events)}


def _state(program: Program) -> dict[str, Any]:
    state: dict[str, Any] = {"random": torch.get_rng_state().sum().item()}
    for m, module in enumerate(program.modules):
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            state[f"{m}.{name}"], state[f"{m}.{name}.grad"] = _seen(value), _seen(value.grad)
    for o, optimizer in enumerate(program.optimizers):
        state[f"optimizer {o}"] = _seen(optimizer.state_dict())
    for t, tensor in enumerate(program.tensors):
        state[f"tensor {t}"], state[f"tensor {t}.grad"] = _seen(tensor), _seen(tensor.grad)
    return state


def _seen(value: Any) -> Any:
    """Something with ``==`` that tells every difference that a user could see."""
    leaves, spec = pytree.tree_flatten(value)
    return [_leaf(leaf) for leaf in leaves], str(spec)


def _leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, (int, float, str, type(None))) else type(leaf).__name__
    bits = leaf.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if leaf.numel() else []
    kind = (
        type(leaf).__name__,
        leaf.dtype,
        tuple(leaf.shape),
        leaf.stride(),
        leaf.requires_grad,
        leaf.is_leaf,
    )
    return (*kind, tuple(bits))


def _first_difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    return next((f"{k}: {expected[k]} != {got[k]}" for k in expected if expected[k] != got[k]), "?")[:2000]
