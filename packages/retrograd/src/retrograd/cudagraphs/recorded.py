"""One recording of a call, for inputs at certain places.

In: the inputs of a call that is recorded. Out: `Recorded`, which says whether it fits the inputs of a later
call, and gives their results (`results` says how). `Pool` knows what a replay overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from retrograd.cudagraphs.pool import Pool, held_here
from retrograd.cudagraphs.results import Results
from retrograd.runtime.tensor import addresses_are, by_dtype, copy_each, geometry_of

#: records a function for these inputs, and empties the list; returns what replays it, and its results.
Record = Callable[[list[Any]], tuple[Any, Sequence[Any]]]
#: by place of an input, where its storage begins, and where it does.
Givers = Mapping[int, tuple[int, int]]


class Places(NamedTuple):
    """Places of inputs that are copied, of inputs whose memory a recording may work in, and of results that
    always stay."""

    copied: Collection[int]
    donated: Collection[int]
    saved: Collection[int]


class Recorded:
    """A recording, the addresses of the inputs that it reads where they are, and buffers for the others.

    Args:
        inputs: of the call. Those that are donated are replaced.
        places: of these and of the results.
        pool: in which it is recorded.
        leaving: places of results that are copied though they are large, and may grow; None: all are.

    Attributes:
        addresses: of the inputs that it was recorded for; 0 for None. copied: the places of those that are
            copied. results: how they are handed out. replays: how many there were. givers: of the inputs
            that other recordings give. used: a number that grows with the last use. The caller sets both.

    Raises:
        Exception: it cannot be recorded; nothing was run.
    """

    def __init__(
        self,
        record: Record,
        inputs: list[Any],
        places: Places,
        pool: Pool,
        leaving: set[int] | None,
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
        pool.donate(inputs, self._donated, self._number)
        kept = [None if i in self._donated else value for i, value in enumerate(given)]
        graph, outputs = record(given)
        self._replay = graph.replay
        self.results = Results(outputs, kept, saved, leaving)
        del outputs  # who holds one from now on is told from that
        self.results.settle()
        pool.enter(self, self.results, self._number)
        order = list(self._buffers)
        targets = [self._buffers[i].target for i in order]
        self._groups = [[order[i] for i in group] for group in by_dtype(targets)]

    def fits(self, inputs: list[Any], loose: Sequence[int]) -> bool:
        """Whether a replay reads these inputs. Only those at `loose` may have other sizes and strides than
        the recorded ones."""
        if any(geometry_of(inputs[i]) != self._layouts[i] for i in loose if i in self._layouts):
            return False
        return addresses_are(inputs, self.addresses, self._static)

    def in_the_way(self, inputs: list[Any]) -> list[Results]:
        """The results that somebody besides `inputs` holds, and that a replay would overwrite."""
        return self._pool.in_the_way(self._number, held_here(inputs, self._donated))

    def is_shared(self, inputs: list[Any]) -> bool:
        """Whether somebody else holds those of `inputs` that were donated."""
        return self._pool.is_shared(self._number, held_here(inputs, self._donated))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """The results for `inputs`, which fit."""
        for group in self._groups:
            copy_each(
                [self._buffers[i].target for i in group], [self._buffers[i].source(inputs[i]) for i in group]
            )
        self.replays += 1
        self._replay()
        self._pool.handed_out(self._number)
        return self.results.hand_out(inputs)
