"""Hands out the results of one recording, and tracks which of them are still referenced.

In: the outputs of a function while it was recorded. Out: `Results`, which returns the results of each replay.
If a result is an input, or a view of one, we return the call's input, or a view of it. Other results either
*stay* in the pool's memory, or we copy them so that the next replay does not change them. A staying result
must not be referenced when a replay overwrites it. Results *saved* for a backward always stay. Their memory
may be donated to the backward's recording; we then hand them out as tensors that do not own it. Of the
results that the caller gets, large ones stay. If the caller is seen to keep one, we copy it from the next
recording on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from retrograd.errors import Refusal
from retrograd.policy import LITTLE
from retrograd.runtime.tensor import (
    are_only_here,
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

#: no recording: greater than any recording's number.
NOBODY = 2**63


#: sizes, strides, and how much further on it begins in memory.
_Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


def _geometry(tensor: torch.Tensor, base: torch.Tensor) -> _Geometry:
    """How `tensor` shows the memory of `base`."""
    further = int(tensor.storage_offset() - base.storage_offset())
    return tuple(tensor.shape), tuple(tensor.stride()), further


class Given:
    """The references that `inputs` at `places` have to memory that was donated to a recording."""

    def __init__(self, inputs: list[Any], places: Collection[int]) -> None:
        self._inputs, self._places = inputs, places

    @cached_property
    def are_all(self) -> bool:
        """Whether nobody else refers to these tensors."""
        return are_only_here(self._inputs, self._places)

    @cached_property
    def counts(self) -> Mapping[int, int]:
        """How many of the tensors refer to each storage, without those that others refer to."""
        inputs = self._inputs
        tensors = [i for i in self._places if isinstance(inputs[i], torch.Tensor)]
        return Counter(storage_of(inputs[i]) for i in tensors if are_only_here(inputs, [i]))


class Results:
    """Hands out the results of one recording.

    Args:
        outputs: as recorded. We do not hold those that share memory with an input.
        inputs: the recording's inputs.
        saved: indices of results that stay, unless they share memory with other results.
        leaving: indices of results that must be copied; `leave` adds to them. None if only `saved` may stay.
        kin: as in `Recorded`.

    Attributes:
        is_outdated: True if we should record again, and copy results that this recording leaves in the pool.
        has_visible: whether any result that the caller gets stays in the pool.
        open: results that may still be referenced: handed out, and not seen to be free since.
        least: the smallest number of a recording to which a result was donated that may still be referenced.

    Raises:
        Refusal: a result aliases an input, or another result, with a different dtype.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        saved: Collection[int],
        leaving: set[int] | None,
        kin: Hashable = None,
    ) -> None:
        self.is_outdated, self.kin = False, kin
        self._constants: list[Any] = [None if isinstance(o, torch.Tensor) else o for o in outputs]
        #: results that are the same tensor as an earlier result. Reference counts must include them.
        self._same: list[tuple[int, int]] = []
        #: results that stay: first the saved ones, then the caller's.
        self._staying: list[tuple[int, torch.Tensor]] = []
        #: the tensors that we copy.
        self._sources: list[torch.Tensor] = []
        #: results that are an input or a copy, or a view of one: the index among the results; that among the
        #: inputs, followed by the copies; and how a view shows it, None if the result is the tensor itself.
        self._shown: list[tuple[int, int, _Geometry | None]] = []
        self._count = len(inputs)
        self._leaving = leaving
        handed_out = {id(output) for place, output in enumerate(outputs) if place not in saved}
        saved = {place for place in saved if id(outputs[place]) not in handed_out}
        visible = self._divide(outputs, inputs, saved)
        self._saved, self.has_visible = len(self._staying), bool(visible)
        self._staying += visible
        # we copy them right after each replay, so other recordings may use their memory
        self._sources = [placed_on(unowned(source), source) for source in self._sources]
        self._layouts = [(tuple(s.shape), tuple(s.stride()), s.dtype) for s in self._sources]
        self._by_dtype = by_dtype(self._sources)
        #: addresses of results that the caller gets: the caller may move them to other memory.
        self._where = {i: tensor.data_ptr() for i, (_, tensor) in enumerate(visible, self._saved)}
        #: for each staying result, the number of the recording to which it was donated.
        self._until, self.least = [NOBODY] * len(self._staying), NOBODY
        self._storages: list[int] = []
        self._at_rest: list[int] = []
        self.open: list[int] = []
        #: by the number of a recording to which results were donated: their storages, and the reference
        #: counts of these when it is called.
        self._expected: dict[int, tuple[list[int], list[int]]] = {}

    def settle(self) -> None:
        """Take the reference counts now as the baseline: only the recording refers to the results."""
        self._storages = [storage_of(tensor) for _, tensor in self._staying]
        self._at_rest = holders(self._storages)

    def is_held(self) -> bool:
        """Whether a staying result is still referenced, or was moved to other memory."""
        return bool(self._held(self.open))

    def is_saved_held(self) -> bool:
        """Whether a result that the last replay saved is still referenced."""
        return bool(self._held([i for i in self.open if i < self._saved]))

    def is_unowned_held(self) -> bool:
        """Whether a donated result is still referenced."""
        return bool(self._held([i for i in self.open if self._until[i] < NOBODY]))

    def is_in(self, storages: Collection[int]) -> bool:
        """Whether one of the results that the caller gets lives in these storages."""
        return any(storage in storages for storage in self._storages[self._saved :])

    def given(self) -> Iterator[int]:
        """The storage addresses of the staying results."""
        return (memory_of(tensor) for _, tensor in self._staying)

    def is_in_the_way(self, own: int, number: int, given: Given) -> bool:
        """Like `Pool.in_the_way`, for the results of recording `own`. False if ``own < number < least``."""
        if own >= number:
            return self.is_held()
        if self._held([i for i in self.open if self._until[i] < number]):
            return True
        if self._is_as_expected(number) and given.are_all:
            return False
        held = self._held([i for i in self.open if self._until[i] == number])
        return any(self._is_outside(i, given) for i in held)

    def is_shared(self, number: int, given: Given) -> bool:
        """Like `Pool.is_shared`."""
        held = self._held([i for i in self.open if i < self._saved and self._until[i] == number])
        return any(self._is_outside(i, given) for i in held)

    def saved_but_for(self, given: Given) -> set[int]:
        """Those of the storages `given` that belong to saved results, and have only the given references."""
        held = self._held([i for i in self.open if i < self._saved and self._until[i] == NOBODY])
        return {self._storages[i] for i in held if not self._is_outside(i, given)}

    def give(self, storages: Mapping[int, int], number: int, is_kin: bool) -> dict[int, torch.Tensor]:
        """Donate memory to recording `number`. Returns, by storage, tensors that do not own that memory.

        We donate the saved results in `storages`, which says how many of its inputs refer to each. If this
        recording saves results, or is kin of that one, we also donate those that the caller got and no
        longer holds.
        """
        visible = range(self._saved, len(self._staying)) if self._saved or is_kin else ()
        free = set(visible).difference(self._held(self.open))
        owned = [i for i, until in enumerate(self._until) if until == NOBODY]
        places = [i for i in owned if self._storages[i] in storages or i in free]
        inputs = [storages.get(self._storages[i], 0) for i in places]
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
        if places:
            counts = [self._at_rest[i] + more for i, more in zip(places, inputs, strict=True)]
            self._expected[number] = [self._storages[i] for i in places], counts
        return {storage: self._staying[i][1].data for storage, i in given.items()}

    def leave(self) -> None:
        """Have the next recording copy the results that the caller holds. The second time, it copies all."""
        found = {self._staying[i][0] for i in self._held(self.open) if i >= self._saved}
        if self.is_outdated or self._leaving is None or not found:
            return
        self._leaving |= {place for place, _ in self._staying[self._saved :]} if self._leaving else found
        self.is_outdated = True

    def _held(self, places: Collection[int]) -> list[int]:
        """The open results at `places` that are still referenced, or were moved to other memory. We close the
        others: no reference to them can appear before the next replay."""
        now, where = holders([self._storages[i] for i in places]), self._where
        held = [
            i
            for i, count in zip(places, now, strict=True)
            if count != self._at_rest[i] or (i in where and where[i] != self._staying[i][1].data_ptr())
        ]
        if len(held) < len(places):
            free = set(places).difference(held)
            self.open = [i for i in self.open if i not in free]
            self._find_least()
        return held

    def _find_least(self) -> None:
        self.least = min([self._until[i] for i in self.open], default=NOBODY)

    def _is_as_expected(self, number: int) -> bool:
        """Whether each result that was donated to recording `number` has as many references as its inputs
        had then. If `number` is called and fits, these are its inputs: they have the same addresses, where
        nothing else can be while the results are held."""
        storages, counts = self._expected.get(number, ([], None))
        return holders(storages) == counts

    def _is_outside(self, i: int, given: Given) -> bool:
        """Whether its storage has more references than the `given` ones."""
        return holders([self._storages[i]])[0] != self._at_rest[i] + given.counts.get(self._storages[i], 0)

    def hand_out(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of the replay that just ran with `inputs`."""
        self.open = [*range(len(self._staying))]
        self._find_least()
        results = list(self._constants)
        for place, tensor in self._staying:
            results[place] = tensor.data  # it has its own version counter
        owners = [*inputs, *self._copies()]
        for place, of, view in self._shown:
            results[place] = owners[of] if view is None else reinterpreted(owners[of], *view)
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

    # once, after recording

    def _divide(
        self, outputs: Sequence[Any], inputs: Sequence[Any], saved: Collection[int]
    ) -> list[tuple[int, torch.Tensor]]:
        """Decide how to hand out each result. Returns the caller's results that stay."""
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
                self._shown.append((place, same, None))
            elif not _has_memory(output):
                made[-place - 1] = [place]
            elif (storage := storage_of(output)) in storages:
                if (i := given.get((storage, output.dtype))) is None:
                    raise Refusal("not-recordable", "a result shows an input as another dtype")
                self._shown.append((place, i, _geometry(output, inputs[i])))
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
        """Have these results copied. If there are several, they share memory."""
        number, first = self._count + len(self._sources), next(iter(members))
        if len(members) == 1 and is_dense(members[first]):
            self._sources.append(members[first])
            self._shown.append((first, number, None))
            return
        if len({tensor.dtype for tensor in members.values()}) > 1:
            raise Refusal("not-recordable", "two results show the same memory as different dtypes")
        whole = whole_of(list(members.values()))
        self._sources.append(whole)
        self._shown += [(place, number, _geometry(tensor, whole)) for place, tensor in members.items()]


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() != 0
