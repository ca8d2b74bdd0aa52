"""The corpora "module_db" and "module_db:float64": every torch.nn module that torch tests, with torch's own
inputs.

In: a module's name as a chunk. Out: one program per input and training mode; parameters and inputs are
leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

import torch

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.corpus.cotangents import backward_from
from gradparity.corpus.fresh import differentiable, fresh
from gradparity.corpus.op_info import corpus_name, seed_everything
from gradparity.errors import UnknownNameError
from gradparity.probe import WIDER, Probe


class ModuleCorpus:
    """torch's module database as a corpus, with parameters and inputs of one dtype; with `layouts`, backward
    goes through each graph several times, with cotangents laid out in several ways.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, layouts: bool = False) -> None:
        self.name = corpus_name("module_db", dtype, layouts)
        self._dtype, self._layouts = dtype, layouts

    @cached_property
    def _infos(self) -> dict[str, Any]:
        from torch.testing._internal.common_modules import module_db

        return {info.name: info for info in module_db}

    def chunks(self) -> list[str]:
        """One chunk per module."""
        return list(self._infos)

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """One program per input, in training mode and, where that differs, in evaluation mode."""
        if chunk not in self._infos:
            raise UnknownNameError("module", chunk, sorted(self._infos))
        info, index = self._infos[chunk], 0
        if self._dtype not in info.dtypes:
            return
        for training in (True, False) if info.train_and_eval_differ else (True,):
            seed_everything(seed)
            inputs = info.module_inputs_func(
                info, device=str(device), dtype=self._dtype, requires_grad=True, training=training
            )
            for item in inputs:
                if item.forward_input is None:
                    continue
                doc = f"{chunk}: {item.desc or 'input'} {index}, {'training' if training else 'evaluation'}"
                case = Case(self.name, chunk, index, seed)
                turn = index if self._layouts else None
                body = partial(
                    run_module,
                    module_class=info.module_cls,
                    item=item,
                    training=training,
                    dtype=self._dtype,
                    turn=turn,
                )
                yield Program(case, body, doc, fp64=self._dtype in WIDER)
                index += 1


def run_module(
    p: Probe, module_class: Any, item: Any, training: bool, dtype: torch.dtype, turn: int | None
) -> None:
    """Builds a module, runs it on copies of an input, and its backward; see `run_sample`."""
    built = copy.deepcopy(item.constructor_input)
    module = p.module(module_class(*built.args, **built.kwargs)).train(training)
    if dtype is not torch.float32:
        module.to(dtype)
    args, kwargs = fresh((tuple(item.forward_input.args), dict(item.forward_input.kwargs)), p)
    leaves = differentiable((args, kwargs))
    for place, leaf in enumerate(leaves):
        p.leaf(f"input {place}", leaf)
    backward_from(p.compile(module)(*args, **kwargs), p, [*leaves, *module.parameters()], turn)
