"""spelled: one sample of torch's databases as a program that names its shapes and arguments.

In: a program of such a database, which finds its inputs by a number. Out: texts with a function `run(p)`,
which the shrinker can cut. They show what the sample shows where its numbers do not matter, or are in the
text: so there are several, and whoever takes one must run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from gradparity.corpus.base import Program
from gradparity.corpus.module_db import run_module
from gradparity.corpus.op_info import run_sample, seed_everything

MOST_NUMBERS = 64
"""So many elements of one tensor are written out."""
OPERATOR = """
from torch.testing._internal.common_methods_invocations import op_db

OPERATOR = next(op for op in op_db if (op.name, op.variant_test_name) == ({name!r}, {variant!r}))
"""


class Unspelled(Exception):
    """A value that has no text."""


def spelled(program: Program) -> Iterator[str]:
    """The texts, those with the fewest numbers first; none for a program that is no sample."""
    body = program.body
    if not isinstance(body, partial) or body.func not in (run_sample, run_module):
        return
    if body.keywords["turn"] is not None:
        return
    for numbers in (_normal, _uniform, _literal):
        try:
            yield _Text(numbers, program.case.seed).of(body)
        except Unspelled:
            continue


class _Text:
    """Writes one program. Arguments: how the numbers of a tensor are written; the seed of what is run."""

    def __init__(self, numbers: Callable[[torch.Tensor], str], seed: int) -> None:
        self._numbers, self._seed = numbers, seed
        self._names: dict[int, str] = {}
        self._lines: list[str] = []

    def of(self, body: partial[Any]) -> str:
        """The text. Raises Unspelled."""
        return self._module(**body.keywords) if body.func is run_module else self._operator(**body.keywords)

    def _operator(self, op: Any, sample: Any, turn: None) -> str:
        given = (sample.input, *sample.args)
        call = ", ".join([*map(self._value, given), *self._keywords(sample.kwargs)])
        name, head = _function(op)
        names = ", ".join(self._names.values())
        self._lines.append(f"out = p.compile(lambda {names}: {name}({call}))({names})")
        return self._text(head, lambda: op(*given, **sample.kwargs))

    def _module(self, module_class: Any, item: Any, training: bool, dtype: torch.dtype, turn: None) -> str:
        built = item.constructor_input
        words = ", ".join([*map(self._value, built.args), *self._keywords(built.kwargs)])
        if self._names:
            raise Unspelled  # a module that is made of tensors
        mode = "" if training else ".eval()"
        wide = "" if dtype is torch.float32 else f".to({dtype})"
        self._lines.append(f"module = p.module(torch.nn.{module_class.__name__}({words})){mode}{wide}")
        given = item.forward_input
        call = ", ".join([*map(self._value, given.args), *self._keywords(given.kwargs)])
        self._lines.append(f"out = p.compile(module)({call})")

        def run() -> Any:
            module = module_class(*built.args, **built.kwargs).to(dtype).train(training)
            return module(*given.args, **given.kwargs)

        return self._text("", run)

    def _text(self, head: str, run: Callable[[], Any]) -> str:
        terms = []
        for place, (name, value) in enumerate(_outputs(run, self._seed)):
            self._lines.append(f"p.value('output {place}', {name})")
            if value.requires_grad:
                sizes = ", ".join(map(str, value.shape))
                term = f"({name} * p.randn({sizes}))" if sizes else name
                terms.append(f"{term}.sum()" + (".abs()" if value.is_complex() else ""))
        if not terms:
            raise Unspelled
        loss = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
        self._lines += ["with p.backward():", f"    {loss}.backward()"]
        body = "".join(f"    {line}\n" for line in self._lines)
        return f"import torch\n{head}\n\ndef run(p):\n{body}"

    def _keywords(self, words: dict[str, Any]) -> list[str]:
        return [f"{key}={self._value(value)}" for key, value in words.items()]

    def _value(self, value: Any) -> str:
        """A value as text; a tensor becomes a line of its own. Raises Unspelled."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        if value is None or type(value) in (bool, int, float, complex, str, torch.Size):
            return repr(tuple(value)) if isinstance(value, torch.Size) else repr(value)
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return repr(value)
        if type(value) in (list, tuple):
            inner = ", ".join(map(self._value, value)) + "," * (len(value) == 1)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if isinstance(value, slice):
            return f"slice({value.start}, {value.stop}, {value.step})"
        raise Unspelled

    def _tensor(self, value: torch.Tensor) -> str:
        if id(value) not in self._names:
            if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_conj():
                raise Unspelled
            name = self._names[id(value)] = "xyzuvwabcdefghij"[min(len(self._names), 15)]
            if list(self._names.values()).count(name) > 1:
                raise Unspelled
            made = _laid_out(value, self._numbers)
            if value.requires_grad:
                made = f"p.leaf('input {name}', {made}.requires_grad_())"
            self._lines.append(f"{name} = {made}")
        return self._names[id(value)]


def _function(op: Any) -> tuple[str, str]:
    """What an operator is called, and what must stand above the program so that it can be."""
    name = resolve_name(op.op)
    if name and name.startswith("torch."):
        return name, ""
    return "OPERATOR", OPERATOR.format(name=op.name, variant=op.variant_test_name)


def _outputs(run: Callable[[], Any], seed: int) -> list[tuple[str, torch.Tensor]]:
    """The tensors that come out, with the text of each. Raises Unspelled."""
    seed_everything(seed)
    try:
        made = run()
    except Exception as error:
        raise Unspelled from error
    if isinstance(made, torch.Tensor):
        return [("out", made)]
    if isinstance(made, tuple) and all(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(made)):
        return [(f"out[{n}]", item) for n, item in enumerate(made) if isinstance(item, torch.Tensor)]
    raise Unspelled


def _laid_out(value: torch.Tensor, numbers: Callable[[torch.Tensor], str]) -> str:
    """A tensor with these strides."""
    plain = value.detach()
    if plain.is_contiguous():
        return numbers(plain)
    order = sorted(range(plain.dim()), key=lambda dim: plain.stride()[dim], reverse=True)
    if not plain.permute(order).is_contiguous():
        raise Unspelled
    back = [order.index(dim) for dim in range(plain.dim())]
    return f"{numbers(plain.permute(order))}.permute({', '.join(map(str, back))})"


def _normal(value: torch.Tensor) -> str:
    return _drawn("randn", value)


def _uniform(value: torch.Tensor) -> str:
    return _drawn("rand", value)


def _drawn(how: str, value: torch.Tensor) -> str:
    if not (value.is_floating_point() or value.is_complex()):
        return _literal(value)
    words = [*map(str, value.shape)]
    if value.dtype is not torch.float32:
        words.append(f"dtype={str(value.dtype).removeprefix('torch.')!r}")
    return f"p.{how}({', '.join(words)})"


def _literal(value: torch.Tensor) -> str:
    if value.numel() > MOST_NUMBERS or not value.numel():
        raise Unspelled
    if value.is_floating_point() and not value.isfinite().all():
        raise Unspelled
    if value.dtype in (torch.float32, torch.int64, torch.bool):
        return f"p.tensor({value.tolist()})"
    return f"p.cast(torch.tensor({value.tolist()}, dtype={value.dtype}))"
