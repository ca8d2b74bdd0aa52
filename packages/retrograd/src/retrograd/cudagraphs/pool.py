"""The memory that recordings share.

In: recordings, as they are made, and their results. Out: `Pool`. For each recording it says which results
are still referenced and prevent a replay, and which inputs may be donated.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from typing import Any

import torch

from retrograd.cudagraphs.buffers import Buffers
from retrograd.cudagraphs.results import Given, Results
from retrograd.runtime.tensor import placed_on, storage_of

#: pools of dropped recordings whose results are still referenced.
_lingering: set[Pool] = set()


class Pool:
    """The memory of recordings. They are numbered in the order in which we make them.

    A recording never uses memory that holds results of earlier recordings, but its temporaries may overwrite
    results of later ones. A forward's saved results may be *donated* to the recording of its backward, which
    frees them as it runs. So may results that the caller got from the forward and has dropped, and those of
    recordings of the same code for other sizes. A donated result no longer owns its memory, and other
    recordings use that memory too. So we can replay a recording if nothing refers to its results, to results
    of a later one, or to results donated before it was made.

    Args:
        handle: the recorder's handle of the pool.
        may_donate: whether results may be donated.
    """

    def __init__(self, handle: Any, *, may_donate: bool = True) -> None:
        self.handle, self._may_donate = handle, may_donate
        self.buffers = Buffers()
        self._count = 0
        self._entered: dict[int, Results] = {}
        #: by number, results that were handed out and not seen to be free since; then, the numbers of dropped
        #: recordings.
        self._out: dict[int, Results] = {}
        self._gone: set[int] = set()
        self._given: frozenset[int] | None = None

    def next_number(self) -> int:
        """The number for a recording that is made now."""
        for pool in [self, *_lingering]:
            pool.let_go()
        self._count += 1
        return self._count

    def enter(self, recorded: object, results: Results, number: int) -> None:
        """Add a recording."""
        self._entered[number], self._given = results, None
        weakref.finalize(recorded, self._went, number).atexit = False

    def handed_out(self, number: int) -> None:
        """Mark the results of recording `number` as handed out."""
        self._out[number] = self._entered[number]

    def in_the_way(self, number: int, given: Given) -> list[Results]:
        """The results that are still referenced and that a replay of recording `number` would overwrite.

        For storages that were donated to it, the `given` references do not count: they are its inputs.
        """
        self.let_go()
        found = []
        near = [item for item in self._out.items() if not item[0] < number < item[1].least]
        for place, one in near:
            if one.is_in_the_way(place, number, given):
                found.append(one)
            elif not one.open:
                del self._out[place]
        return found

    def is_shared(self, number: int, given: Given) -> bool:
        """Whether memory that was donated to recording `number` has more references than the `given` ones."""
        return any(one.is_shared(number, given) for one in self._out.values())

    def donatable(self, inputs: list[Any], places: Iterable[int]) -> set[int]:
        """The indices among `places` of inputs that were saved in this pool and have no other references."""
        if not self._may_donate:
            return set()
        given = Given(inputs, [*places])
        free = {storage for one in self._out.values() for storage in one.saved_but_for(given)}
        return {i for i in places if isinstance(inputs[i], torch.Tensor) and storage_of(inputs[i]) in free}

    def donate(self, inputs: list[Any], places: Collection[int], number: int, kin: Hashable) -> None:
        """Donate the memory of `inputs` at `places` to recording `number`.

        We also donate results that callers got with them and have dropped, and dropped results of `kin`.
        Tensors that do not own the memory replace them, in `inputs` and among the results.
        """
        tensors = {place: inputs[place] for place in places}
        storages = Counter(storage_of(tensor) for tensor in tensors.values())
        aliases: dict[int, torch.Tensor] = {}
        for one in self._entered.values():
            is_kin = self._may_donate and kin is not None and one.kin == kin
            if places or is_kin:
                aliases |= one.give(storages, number, is_kin)
        for place, tensor in tensors.items():
            inputs[place] = placed_on(aliases[storage_of(tensor)].untyped_storage(), tensor)

    def is_unowned_in_use(self) -> bool:
        """Whether results in donated memory are still referenced. A new recording could overwrite them."""
        self.let_go()
        return any(one.is_unowned_held() for one in self._out.values())

    def is_held(self) -> bool:
        """Whether any result is still referenced."""
        return any(one.is_held() for one in self._out.values())

    def given(self) -> frozenset[int]:
        """The storage addresses of all results that recordings hand out."""
        if self._given is None:
            self._given = frozenset(address for one in self._entered.values() for address in one.given())
        return self._given

    def let_go(self) -> int:
        """Forget dropped recordings whose results are no longer referenced. Their memory is free. Returns how
        many recordings are left."""
        for number in list(self._gone):
            if not self._entered[number].is_held():
                del self._entered[number]
                self._out.pop(number, None)
                self._gone.discard(number)
                self._given = None
        if not self._gone:
            _lingering.discard(self)
        return len(self._entered)

    def _went(self, number: int) -> None:
        """Handle a recording that was dropped. If its results are still referenced, the pool must stay alive,
        because they may not own their memory."""
        self._gone.add(number)
        if self._entered[number].is_held():
            _lingering.add(self)
