"""Copies inputs whose memory is not aligned as Inductor's code assumes.

In: compiled code, and which inputs must be aligned to 16 bytes. Out: a boxed callable that passes copies of
unaligned inputs.

Inductor's own check is also a Python loop, with four times as many instructions. Stock skips it for
parameters, although a user may set their ``data`` to a slice. Our graphs have all parameters among their
inputs, and run in parts, each with its own inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

Run = Callable[[list[Any]], Sequence[Any]]


def aligned(compiled: Any, places: Sequence[int]) -> Run:
    """Run `compiled`, an `OutputCode` that takes its inputs as one list, with the inputs at `places` aligned.

    The first call, and calls under the profiler, go through the code that Inductor wraps around it.
    """
    address_of = torch.Tensor.data_ptr
    # With a single index, an ``itemgetter`` does not return a tuple.
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
    """Run the code on copies of unaligned inputs. If it writes to them, the copies are copied back."""
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    written = OrderedSet(getattr(compiled, "mutated_input_idxs", ()))
    results: Sequence[Any] = align_inputs_from_check_idxs(compiled, places, written)(args)
    return results
