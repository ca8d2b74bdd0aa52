"""How to hand out the results of one recording, and who holds them.

In: what a function gave while it was recorded. Out: `Results`, which gives the results of each replay. Those
that are, or lie in, an input are, or lie in, the input of this call. Others *stay* where the recording writes
them, or are copied, so that the next replay does not change them. What stays may not be held by anybody when
a replay writes there again. What was *saved* for a backward always stays, and may be given away to the
recording of the backward: then it is handed out without owning its memory. Of what the user gets, large
results stay, and are copied from then on if he is found to hold one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from retrograd.errors import Refusal
from retrograd.policy import LITTLE
from retrograd.runtime.tensor import (
    by_dtype,
    copy_each,
    geometry_of,
    holders,
    is_dense,
    memory_of,
    new_memory,
    placed_on,
    reinterpreted,
    storage_of,
    unowned,
    whole_of,
)

#: nobody: greater than the number of any recording.
NOBODY = 2**63


class _View(NamedTuple):
    """A result, `place`, that begins `further` elements behind the tensor number `of`."""

    place: int
    of: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    further: int

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        return reinterpreted(tensor, self.size, self.stride, self.further)


class Results:
    """How to hand out the results of one recording.

    Args:
        outputs: as recorded. Those that share memory with an input are not held.
        inputs: as the recording got them.
        saved: places of results that stay where they are, unless they share memory with others.
        leaving: places of results that do not stay, to which `leave` adds; None: no others than `saved` stay.

    Attributes:
        is_outdated: whether there is to be another recording, which copies what this one leaves where it is.
        least: of the numbers of the recordings that some which somebody may hold were donated to.

    Raises:
        Refusal: a result shows an input, or another result, as another dtype.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        saved: Collection[int],
        leaving: set[int] | None,
    ) -> None:
        self.is_outdated = False
        self._constants: list[Any] = [None if isinstance(o, torch.Tensor) else o for o in outputs]
        self._passed: list[tuple[int, int]] = []
        #: results that are the one at an earlier place: whoever counts references must find them.
        self._same: list[tuple[int, int]] = []
        self._of_inputs: list[_View] = []
        #: what stays: what was saved, and behind it what the user gets.
        self._staying: list[tuple[int, torch.Tensor]] = []
        #: what is copied, and where the copies stand among the results, or of which copies they are views.
        self._sources: list[torch.Tensor] = []
        self._direct: list[tuple[int, int]] = []
        self._of_copies: list[_View] = []
        self._leaving = leaving
        handed_out = {id(output) for place, output in enumerate(outputs) if place not in saved}
        saved = {place for place in saved if id(outputs[place]) not in handed_out}
        visible = self._divide(outputs, inputs, saved)
        self._saved = len(self._staying)
        self._staying += visible
        # they are copied right after each replay, so others may work there
        self._sources = [placed_on(unowned(source), source) for source in self._sources]
        self._layouts = [(tuple(s.shape), tuple(s.stride()), s.dtype) for s in self._sources]
        self._by_dtype = by_dtype(self._sources)
        #: of what the user gets: he may give it other memory.
        self._where = {i: tensor.data_ptr() for i, (_, tensor) in enumerate(visible, self._saved)}
        #: the numbers of the recordings that each was donated to.
        self._until, self.least = [NOBODY] * len(self._staying), NOBODY
        self._storages: list[int] = []
        self._at_rest: list[int] = []
        #: what somebody may hold: it was handed out, and nobody was found not to hold it since.
        self._open: list[int] = []

    def settle(self) -> None:
        """Nobody but the recording holds the results now: who does later is told from that."""
        self._storages = [storage_of(tensor) for _, tensor in self._staying]
        self._at_rest = holders(self._storages)

    @property
    def has_visible(self) -> bool:
        """Whether results stay that the user gets."""
        return len(self._staying) > self._saved

    @property
    def is_out(self) -> bool:
        """Whether somebody may hold them."""
        return bool(self._open)

    def is_held(self) -> bool:
        """Whether somebody holds what stays, or has given it other memory."""
        return bool(self._held(self._open))

    def is_saved_held(self) -> bool:
        """Whether somebody holds what was saved in the last replay."""
        return bool(self._held([i for i in self._open if i < self._saved]))

    def is_unowned_held(self) -> bool:
        """Whether somebody holds what has been donated."""
        return bool(self._held([i for i in self._open if self._until[i] < NOBODY]))

    def is_in(self, storages: Collection[int]) -> bool:
        """Whether some of what the user gets lies in these storages."""
        return any(storage in storages for storage in self._storages[self._saved :])

    def given(self) -> Iterator[int]:
        """Where the storages begin of what stays."""
        return (memory_of(tensor) for _, tensor in self._staying)

    def is_in_the_way(self, own: int, number: int, given: Mapping[int, int]) -> bool:
        """As `Pool.in_the_way`, of the results of recording `own`; not if ``own < number < least``."""
        if own >= number:
            return self.is_held()
        held = self._held([i for i in self._open if self._until[i] <= number])
        return any(self._until[i] < number or self._is_outside(i, given) for i in held)

    def is_shared(self, number: int, given: Mapping[int, int]) -> bool:
        """As `Pool.is_shared`."""
        held = self._held([i for i in self._open if i < self._saved and self._until[i] == number])
        return any(self._is_outside(i, given) for i in held)

    def saved_but_for(self, given: Mapping[int, int]) -> set[int]:
        """Of the storages `given`, those of saved results of which the given holders are all."""
        held = self._held([i for i in self._open if i < self._saved and self._until[i] == NOBODY])
        return {self._storages[i] for i in held if not self._is_outside(i, given)}

    def give(self, storages: Collection[int], number: int) -> dict[int, torch.Tensor]:
        """Own those of the storages no more that are saved, and nothing of what a user got beside what was
        saved, and does not hold; returns what lies in that memory from now on."""
        visible = range(self._saved, len(self._staying)) if self._saved else ()
        free = set(visible).difference(self._held(self._open))
        owned = [i for i, until in enumerate(self._until) if until == NOBODY]
        places = [i for i in owned if self._storages[i] in storages or i in free]
        aliases = {self._storages[i]: unowned(self._staying[i][1]) for i in places}
        given = {self._storages[i]: i for i in places}
        for i in places:
            place, tensor = self._staying[i]
            self._staying[i] = place, placed_on(aliases[self._storages[i]], tensor)
            self._until[i] = number
        self._find_least()
        aliases.clear()
        for i in places:
            self._storages[i] = storage_of(self._staying[i][1])
            self._at_rest[i] = holders([self._storages[i]])[0]
        return {storage: self._staying[i][1].data for storage, i in given.items()}

    def leave(self) -> None:
        """Have what the user holds copied by the next recording; if it comes to that again, all."""
        found = {self._staying[i][0] for i in self._held(self._open) if i >= self._saved}
        if self.is_outdated or self._leaving is None or not found:
            return
        self._leaving |= {place for place, _ in self._staying[self._saved :]} if self._leaving else found
        self.is_outdated = True

    def _held(self, places: Collection[int]) -> list[int]:
        """Which of `places`, open ones, somebody holds, or has given other memory. The others are open no
        more: nobody can come to hold them before the next replay."""
        now, where = holders([self._storages[i] for i in places]), self._where
        held = [
            i
            for i, count in zip(places, now, strict=True)
            if count != self._at_rest[i] or (i in where and where[i] != self._staying[i][1].data_ptr())
        ]
        if len(held) < len(places):
            free = set(places).difference(held)
            self._open = [i for i in self._open if i not in free]
            self._find_least()
        return held

    def _find_least(self) -> None:
        self.least = min([self._until[i] for i in self._open], default=NOBODY)

    def _is_outside(self, i: int, given: Mapping[int, int]) -> bool:
        """Whether others hold it than the `given`."""
        return holders([self._storages[i]])[0] != self._at_rest[i] + given.get(self._storages[i], 0)

    def hand_out(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of the replay that has just been made with `inputs`."""
        self._open = [*range(len(self._staying))]
        self._find_least()
        results = list(self._constants)
        for place, i in self._passed:
            results[place] = inputs[i]
        for view in self._of_inputs:
            results[view.place] = view.on(inputs[view.of])
        for place, tensor in self._staying:
            results[place] = tensor.data  # with a version counter of its own
        copies = self._copies()
        for place, i in self._direct:
            results[place] = copies[i]
        for view in self._of_copies:
            results[view.place] = view.on(copies[view.of])
        for place, earlier in self._same:
            results[place] = results[earlier]
        return results

    def _copies(self) -> list[torch.Tensor]:
        if not self._sources:
            return []
        make = new_memory(self._sources[0].device)
        copies = [make(*layout) for layout in self._layouts]
        for group in self._by_dtype:
            copy_each([copies[i] for i in group], [self._sources[i] for i in group])
        return copies

    # once

    def _divide(
        self, outputs: Sequence[Any], inputs: Sequence[Any], saved: Collection[int]
    ) -> list[tuple[int, torch.Tensor]]:
        """Say of each result how it is handed out; returns what the user gets and stays."""
        visible: list[tuple[int, torch.Tensor]] = []
        given = {(storage_of(t), t.dtype): i for i, t in enumerate(inputs) if _has_memory(t)}
        storages = {storage for storage, _ in given}
        made: dict[int, list[int]] = {}
        objects = {id(value): i for i, value in enumerate(inputs) if value is not None}
        seen: dict[int, int] = {}
        for place, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                continue
            if geometry_of(output) is None:
                raise Refusal("not-recordable", "a result is lazily conjugated or negated, sparse or batched")
            if seen.setdefault(id(output), place) != place:
                self._same.append((place, seen[id(output)]))
            elif (same := objects.get(id(output))) is not None:
                self._passed.append((place, same))
            elif not _has_memory(output):
                made[-place - 1] = [place]
            elif (storage := storage_of(output)) in storages:
                if (i := given.get((storage, output.dtype))) is None:
                    raise Refusal("not-recordable", "a result shows an input as another dtype")
                self._of_inputs.append(_view(place, i, output, inputs[i]))
            else:
                made.setdefault(storage, []).append(place)
        for places in made.values():
            members = {place: outputs[place] for place in places}
            if all(place in saved for place in places):
                self._staying += members.items()
            elif self._may_stay(members):
                visible += members.items()
            else:
                self._copy(members)
        return visible

    def _may_stay(self, members: dict[int, torch.Tensor]) -> bool:
        is_large = any(tensor.untyped_storage().nbytes() >= LITTLE for tensor in members.values())
        return is_large and self._leaving is not None and self._leaving.isdisjoint(members)

    def _copy(self, members: dict[int, torch.Tensor]) -> None:
        """These results, which share memory if there are several, are copied."""
        number = len(self._sources)
        first = next(iter(members))
        if len(members) == 1 and is_dense(members[first]):
            self._sources.append(members[first])
            self._direct.append((first, number))
            return
        if len({tensor.dtype for tensor in members.values()}) > 1:
            raise Refusal("not-recordable", "two results show the same memory as different dtypes")
        whole = whole_of(list(members.values()))
        self._sources.append(whole)
        self._of_copies += [_view(place, number, tensor, whole) for place, tensor in members.items()]


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() != 0


def _view(place: int, of: int, tensor: torch.Tensor, base: torch.Tensor) -> _View:
    further = int(tensor.storage_offset() - base.storage_offset())
    return _View(place, of, tuple(tensor.shape), tuple(tensor.stride()), further)
