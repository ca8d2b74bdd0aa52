"""One recording of a call, for inputs at certain addresses.

In: the inputs of the call that is recorded. Out: `Recorded`, which says whether it fits the inputs of a later
call, and returns the results for them (see `results`). `Pool` knows what a replay overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from retrograd.cudagraphs.pool import Pool
from retrograd.cudagraphs.results import Given, Results
from retrograd.runtime.tensor import addresses_are, by_dtype, copy_each, geometry_of

#: records a function for these inputs, and empties the list. Returns the graph to replay, and its results.
Record = Callable[[list[Any]], tuple[Any, Sequence[Any]]]
#: by index of an input: where its storage begins, and where the input itself begins.
Givers = Mapping[int, tuple[int, int]]


class Places(NamedTuple):
    """Indices of the inputs that we copy, of the inputs that are donated, and of the results that always
    stay."""

    copied: Collection[int]
    donated: Collection[int]
    saved: Collection[int]


class Recorded:
    """A recording, with the addresses of the inputs that it reads directly, and buffers for the others.

    Args:
        record: makes the recording.
        inputs: of the call. Donated inputs are replaced by the pool's memory.
        places: which inputs are copied or donated, and which results stay.
        pool: where it is recorded.
        leaving: indices of results that we copy although they are large; the set may grow. None if all are.
        kin: equal for recordings of the same code for different sizes; None if there is one set of sizes.

    Attributes:
        addresses: of the inputs that it was recorded for; 0 for None.
        copied: indices of the inputs that are copied.
        results: hands out the results.
        replays: how often it was replayed.
        givers: the inputs that other recordings produce. The caller sets it.
        used: a number that grows with each use. The caller sets it.

    Raises:
        Exception: the call cannot be recorded; nothing was run.
    """

    def __init__(
        self,
        record: Record,
        inputs: list[Any],
        places: Places,
        pool: Pool,
        leaving: set[int] | None,
        kin: Hashable = None,
    ) -> None:
        self.copied, self._donated, saved = places
        self._pool, self.replays = pool, 0
        self.givers: Givers = {}
        self.used = 0
        tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        copied = [i for i in tensors if i in self.copied]
        self._buffers = dict(zip(copied, pool.buffers.like([inputs[i] for i in copied]), strict=True))
        self._static = [i for i in tensors if i not in self.copied]
        self._layouts = {i: geometry_of(inputs[i]) for i in tensors}
        self.addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else 0 for v in inputs]
        self._number = pool.next_number()
        given = [self._buffers[i].tensor if i in self._buffers else value for i, value in enumerate(inputs)]
        pool.donate(inputs, self._donated, self._number, kin)
        kept = [None if i in self._donated else value for i, value in enumerate(given)]
        graph, outputs = record(given)
        self._replay = graph.replay
        self.results = Results(outputs, kept, saved, leaving, kin)
        del outputs  # so that `settle` counts only our references
        self.results.settle()
        pool.enter(self, self.results, self._number)
        order = list(self._buffers)
        targets = [self._buffers[i].target for i in order]
        self._groups = [[order[i] for i in group] for group in by_dtype(targets)]

    def fits(self, inputs: list[Any], loose: Sequence[int]) -> bool:
        """Whether a replay would read these inputs. Only the inputs at `loose` may differ from the recorded
        ones in sizes and strides; for them, we compare these."""
        if any(geometry_of(inputs[i]) != self._layouts[i] for i in loose if i in self._layouts):
            return False
        return addresses_are(inputs, self.addresses, self._static)

    def moved(self, inputs: list[Any]) -> set[int]:
        """Indices of the inputs that a replay would not read, because they are elsewhere now."""
        return {i for i in self._static if inputs[i].data_ptr() != self.addresses[i]}

    def in_the_way(self, inputs: list[Any]) -> list[Results]:
        """The results that are referenced outside `inputs`, and that a replay would overwrite."""
        return self._pool.in_the_way(self._number, Given(inputs, self._donated))

    def is_shared(self, inputs: list[Any]) -> bool:
        """Whether donated inputs have other references."""
        return self._pool.is_shared(self._number, Given(inputs, self._donated))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Replay for `inputs`, which must fit. Returns the results."""
        for group in self._groups:
            copy_each(
                [self._buffers[i].target for i in group], [self._buffers[i].source(inputs[i]) for i in group]
            )
        self.replays += 1
        self._replay()
        self._pool.handed_out(self._number)
        return self.results.hand_out(inputs)
