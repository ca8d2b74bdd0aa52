"""Programs from torch's OpInfo databases: one operator per chunk, one program per sample.

In: a list of OpInfos, a dtype and a device. Out: programs that run the operator and its backward on copies of
each sample.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.corpus.cotangents import backward_from
from gradparity.corpus.fresh import differentiable, fresh
from gradparity.errors import UnknownNameError
from gradparity.probe import WIDER, Probe


class OpInfoCorpus:
    """A database of OpInfos as a corpus.

    Arguments: the database's name, a function that loads it (called at first use: loading takes seconds), the
    samples' dtype, and whether their cotangents are laid out in several ways. The latter two are part of the
    corpus's name.
    """

    def __init__(
        self,
        database: str,
        load: Callable[[], Iterable[Any]],
        dtype: torch.dtype = torch.float32,
        layouts: bool = False,
    ) -> None:
        self.name = corpus_name(database, dtype, layouts)
        self._database, self._load = database, load
        self._dtype, self._layouts = dtype, layouts

    @cached_property
    def _ops(self) -> dict[str, Any]:
        return {op_name(op): op for op in self._load() if _is_differentiable(op, self._dtype)}

    def chunks(self) -> list[str]:
        """One chunk per differentiable operator and variant."""
        return list(self._ops)

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """One program per sample of this operator."""
        if chunk not in self._ops:
            raise UnknownNameError("operator", chunk, sorted(self._ops))
        op = self._ops[chunk]
        if self._dtype not in op.supported_backward_dtypes(device.type):
            return
        seed_everything(seed)
        for index, sample in enumerate(op.sample_inputs(str(device), self._dtype, requires_grad=True)):
            case, doc = Case(self.name, chunk, index, seed), f"{chunk}: sample {index}"
            dtype, turn = str(self._dtype).removeprefix("torch."), index if self._layouts else None
            plain = partial(
                sample_program,
                database=self._database,
                operator=chunk,
                dtype=dtype,
                index=index,
                turn=turn,
            )
            body = partial(run_sample, op=op, sample=sample, turn=turn)
            yield Program(case, body, doc, fp64=self._dtype in WIDER, plain=plain)


DATABASES = {
    "op_db": "torch.testing._internal.common_methods_invocations",
    "autograd_function_db": "torch.testing._internal.autograd_function_db",
    "hop_db": "torch.testing._internal.hop_db",
}
"""Where torch keeps each database."""


def sample_program(
    p: Probe, database: str, operator: str, dtype: str, index: int, turn: int | None = None
) -> None:
    """One sample of one operator of a database: the operator, then its backward."""
    ops = getattr(importlib.import_module(DATABASES[database]), database)
    op = next(item for item in ops if op_name(item) == operator)
    seed_everything(p.seed)
    samples = op.sample_inputs(str(p.device), getattr(torch, dtype), requires_grad=True)
    sample = list(samples)[index]
    torch.manual_seed(p.seed)
    run_sample(p, op, sample, turn)


def corpus_name(database: str, dtype: torch.dtype, layouts: bool = False) -> str:
    """ "op_db" for float32, "op_db:bfloat16" for others; "op_db_cotangents" for several layouts of these."""
    database += "_cotangents" if layouts else ""
    return database if dtype is torch.float32 else f"{database}:{str(dtype).removeprefix('torch.')}"


def seed_everything(seed: int) -> None:
    """The same samples in every process: they are drawn from three generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def op_name(op: Any) -> str:
    """An operator and its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _is_differentiable(op: Any, dtype: torch.dtype) -> bool:
    kinds = op.supported_backward_dtypes("cpu") | op.supported_backward_dtypes("cuda")
    return bool(op.supports_autograd) and dtype in kinds


def run_sample(p: Probe, op: Any, sample: Any, turn: int | None = None) -> None:
    """Runs an operator on copies of a sample, and its backward; with a turn, by layouts of the cotangents."""
    inputs, args, kwargs = fresh((sample.input, sample.args, dict(sample.kwargs)), p)
    leaves = differentiable((inputs, args, kwargs))
    for place, leaf in enumerate(leaves):
        p.leaf(f"input {place}", leaf)

    def forward(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return op(inputs, *args, **kwargs)

    outputs = p.compile(forward)(inputs, *args, **kwargs)
    backward_from(sample.output_process_fn_grad(outputs), p, leaves, turn)
