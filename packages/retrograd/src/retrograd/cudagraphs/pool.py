"""The memory that recordings share, and what a replay overwrites.

In: recordings, as they are made, and their results. Out: `Pool`, which says of each recording which results
that somebody holds are in the way of its replay, and which of its inputs may be donated to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from retrograd.cudagraphs.buffers import Buffers
from retrograd.cudagraphs.results import Results
from retrograd.policy import FEW, GAPS, MANY
from retrograd.runtime.tensor import is_only_here, placed_on, storage_of

#: pools without recordings, of which somebody holds results.
_lingering: set[Pool] = set()


class Pool:
    """Memory of recordings, which are numbered in the order in which they are made.

    A recording allocates where no earlier one has its results, and works where later ones have theirs. What a
    forward saved may be *donated* to the recording of its backward, which frees it as it goes on; so are
    results that the user got from a forward, and let go of before. From then on the result lies there without
    owning the memory, and other recordings work there too. So a recording can be replayed if nobody holds
    results of its own, of a later one, or such as were donated before it was made.

    Args:
        handle: of the recorder.
        may_donate: whether anything is donated.
    """

    def __init__(self, handle: Any, *, may_donate: bool = True) -> None:
        self.handle, self._may_donate = handle, may_donate
        self.buffers = Buffers()
        self._count = self._seen = self._quiet = 0
        self._entered: dict[int, Results] = {}
        #: of these, results that were handed out since nobody was found to hold them, and the numbers of
        #: recordings that are gone.
        self._out: dict[int, Results] = {}
        self._gone: set[int] = set()
        self._given: frozenset[int] | None = None

    def next_number(self) -> int:
        """That of a recording which is made now."""
        for pool in [self, *_lingering]:
            pool.let_go()
        self._count += 1
        return self._count

    def enter(self, recorded: object, results: Results, number: int) -> None:
        """Take note of one more recording."""
        self._entered[number], self._given = results, None
        weakref.finalize(recorded, self._went, number).atexit = False

    def handed_out(self, number: int) -> None:
        """The results of recording `number` are somebody's now."""
        self._out[number] = self._entered[number]

    def in_the_way(self, number: int, given: Mapping[int, int]) -> list[Results]:
        """The results that somebody holds, and that a replay of recording `number` would overwrite. Of
        storages that were donated to it, the `given` holders do not count: they are its inputs."""
        self.let_go()
        found = []
        near = [item for item in self._out.items() if not item[0] < number < item[1].least]
        for place, one in near:
            if one.is_in_the_way(place, number, given):
                found.append(one)
            elif not one.is_out:
                del self._out[place]
        return found

    def is_shared(self, number: int, given: Mapping[int, int]) -> bool:
        """Whether somebody besides the `given` holds what was donated to recording `number`."""
        return any(one.is_shared(number, given) for one in self._out.values())

    def donatable(self, inputs: list[Any], places: Iterable[int]) -> set[int]:
        """Of `places`, those of inputs that were saved here, and that nobody else holds."""
        if not self._may_donate:
            return set()
        given = held_here(inputs, places)
        free = {storage for one in self._out.values() for storage in one.saved_but_for(given)}
        return {i for i in places if isinstance(inputs[i], torch.Tensor) and storage_of(inputs[i]) in free}

    def donate(self, inputs: list[Any], places: Collection[int], number: int) -> None:
        """Leave the memory of `inputs` at `places` to recording `number`, and that of what users got beside
        them and do not hold. In the list, and among the results, stand tensors from then on that do not own
        it. Nothing happens where there are no places."""
        if not places:
            return
        tensors = {place: inputs[place] for place in places}
        storages = {storage_of(tensor) for tensor in tensors.values()}
        aliases: dict[int, torch.Tensor] = {}
        for one in self._entered.values():
            aliases |= one.give(storages, number)
        for place, tensor in tensors.items():
            inputs[place] = placed_on(aliases[storage_of(tensor)].untyped_storage(), tensor)

    def is_unowned_in_use(self) -> bool:
        """Whether somebody holds results that lie in memory which is nobody's: what is recorded now could
        work there."""
        self.let_go()
        return any(one.is_unowned_held() for one in self._out.values())

    def comes_round(self) -> int:
        """The program begins again: how often it has since many recordings were made."""
        is_quiet = (self._count - self._seen) * FEW <= len(self._entered)
        self._quiet, self._seen = self._quiet + 1 if is_quiet else 0, self._count
        return self._quiet

    def has_gaps(self) -> bool:
        """Whether many recordings are gone: others were made while these had their memory."""
        self.let_go()
        return self._count >= len(self._entered) * GAPS >= MANY * GAPS

    def is_held(self) -> bool:
        """Whether somebody holds results."""
        return any(one.is_held() for one in self._out.values())

    def given(self) -> frozenset[int]:
        """Where the storages begin that recordings hand out."""
        if self._given is None:
            self._given = frozenset(address for one in self._entered.values() for address in one.given())
        return self._given

    def let_go(self) -> None:
        """Forget recordings that are gone, unless somebody holds what they gave: its memory is free then."""
        for number in list(self._gone):
            if not self._entered[number].is_held():
                del self._entered[number]
                self._out.pop(number, None)
                self._gone.discard(number)
                self._given = None
        if not self._gone:
            _lingering.discard(self)

    def _went(self, number: int) -> None:
        """A recording is gone: stay, if somebody holds what it gave. It may own no memory."""
        self._gone.add(number)
        if self._entered[number].is_held():
            _lingering.add(self)


def held_here(inputs: list[Any], places: Iterable[int]) -> Mapping[int, int]:
    """How many of the tensors at `places` hold each storage. What others refer to does not count."""
    found: dict[int, int] = {}
    for i in places:
        if is_only_here(inputs, i):
            storage = storage_of(inputs[i])
            found[storage] = found.get(storage, 0) + 1
    return found
