"""Samples of torch's operator database: every differentiable operator that torch tests, on any layout.

In: a scope. Out: a call of one operator, with the arguments of one of its samples; the tensors among them are
inputs of the draft, small integers and masks stand in the text. Operators whose text cannot be written (a
sample with a generator, a callable without a name) are left out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from gradparity.generate.draft import Draft, Rejected, Scope
from gradparity.generate.inputs import add_input

MOST_NUMBERS, MOST_ELEMENTS = 64, 2048
CANDIDATES = 12
"""Of each operator, only the first samples are drawn from: the rest repeats them in other shapes."""
LEFT_OUT = ("empty", "uninitialized", "nn.functional.multi_head_attention_forward", "special.")


def sample_of_op_db(scope: Scope) -> bool:
    """One operator with one sample's arguments."""
    name = scope.chance.deal("samples", operator_names())
    samples = _samples(name)
    if not samples:
        return False
    target, inputs, args, kwargs = scope.chance.pick(samples)
    try:
        texts = [_text(scope.draft, value) for value in (inputs, *args)]
        texts += [f"{key}={_text(scope.draft, value)}" for key, value in kwargs.items()]
    except (TypeError, Rejected):
        return False
    return scope.add(f"{scope.draft.name('v')} = {_call(target, texts)}")


@cache
def operator_names() -> tuple[str, ...]:
    """Names of all operators that have a gradient and a text."""
    return tuple(name for name, op in _database().items() if op.supports_autograd and _target(op))


@cache
def _database() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.name: op for op in op_db if not op.variant_test_name and not op.name.startswith(LEFT_OUT)}


def _target(op: Any) -> str:
    """The public name of the operator's function, or of its method behind a dot; empty if it has none."""
    for head, module in (("torch", torch), ("torch.nn.functional", torch.nn.functional)):
        path = op.name.removeprefix("nn.functional.")
        found: Any = module
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None and found is op.op:
            return f"{'F' if head != 'torch' else head}.{path}"
    return f".{op.name}" if getattr(torch.Tensor, op.name, None) is op.op else ""


@cache
def _samples(name: str) -> tuple[tuple[str, Any, tuple[Any, ...], dict[str, Any]], ...]:
    op = _database()[name]
    if torch.float32 not in op.supported_backward_dtypes("cpu"):
        return ()
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
            if _is_small((sample.input, *sample.args, *sample.kwargs.values())):
                found.append((_target(op), sample.input, tuple(sample.args), dict(sample.kwargs)))
            if len(found) >= CANDIDATES:
                break
    return tuple(found)


def _is_small(value: Any) -> bool:
    """Whether its tensors are of a size that has a text: samples stay in memory, and some have megabytes."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_small, value))
    return not isinstance(value, torch.Tensor) or value.numel() <= MOST_ELEMENTS


def _call(target: str, texts: list[str]) -> str:
    if target.startswith("."):
        return f"{texts[0]}{target}({', '.join(texts[1:])})"
    return f"{target}({', '.join(texts)})"


def _text(draft: Draft, value: Any) -> str:
    """The text of an argument; tensors of real numbers become inputs. Raises TypeError if there is none."""
    if isinstance(value, torch.Tensor):
        return _tensor(draft, value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(draft, item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
    if isinstance(value, float):
        return repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    if value is None or isinstance(value, (bool, int, str, complex)):
        return repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    raise TypeError(f"no text for {type(value).__name__}")


def _tensor(draft: Draft, value: torch.Tensor) -> str:
    if type(value) is not torch.Tensor or value.layout is not torch.strided or not _is_small(value):
        raise TypeError("no text for this tensor")
    if value.is_floating_point():
        positive = bool((value > 0).all()) and value.numel() > 0
        return add_input(draft, tuple(value.shape), "positive" if positive else "float")
    if value.numel() > MOST_NUMBERS or value.is_complex():
        raise TypeError("no text for this tensor")
    return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
