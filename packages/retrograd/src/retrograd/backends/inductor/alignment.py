"""Inputs of Inductor's code that begin elsewhere in memory than it relies on.

In: compiled code, and which inputs must begin at a multiple of 16 bytes. Out: a boxed callable that gives it
copies of those that do not.

Inductor's own check is a loop in Python as well, of four times as many instructions. In stock it spares
parameters, whose ``data`` a user may set to a slice. A graph of ours has all parameters among its inputs, and
is called in parts, each with inputs of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

Run = Callable[[list[Any]], Sequence[Any]]


def aligned(compiled: Any, places: Sequence[int]) -> Run:
    """`compiled`, an `OutputCode` that takes its inputs as one list, with the inputs at `places` aligned.

    What Inductor does around its code serves the first call, and the profiler.
    """
    address_of = torch.Tensor.data_ptr
    # Of one place, an ``itemgetter`` gives no tuple.
    given = operator.itemgetter(*places, places[0]) if places else tuple
    has_run = False

    def run(args: list[Any]) -> Sequence[Any]:
        nonlocal has_run
        if places:
            for address in map(address_of, given(args)):
                if address & 15:
                    return _run_on_copies(compiled, places, args)
        if has_run and not profiler._is_profiler_enabled:
            results: Sequence[Any] = compiled.current_callable(args)
            return results
        results = compiled(args)
        has_run = True
        return results

    return run


def _run_on_copies(compiled: Any, places: Sequence[int], args: list[Any]) -> Sequence[Any]:
    """Run it on copies of inputs that are not aligned; what it writes into them is copied back."""
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    written = OrderedSet(getattr(compiled, "mutated_input_idxs", ()))
    results: Sequence[Any] = align_inputs_from_check_idxs(compiled, places, written)(args)
    return results
