"""One recording of a call, for inputs at certain places.

In: the inputs of a call that is recorded. Out: `Recorded`, which says whether it fits the
inputs of a later call, and gives their results. Those that are, or lie in, an input are, or lie in, the input
of this call. Others *stay* where the recording writes them, or are copied, so that the next replay does not
change them. What stays may not be held by anybody when a replay writes there again. What was *saved* for a
backward always stays. Of what the user gets, large results stay, and are copied from then on if he is found
to hold one of them. `Pool` knows what a replay overwrites.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from retrograd._torch.tensor import (
    addresses_are,
    by_dtype,
    copy_each,
    geometry_of,
    holders,
    is_dense,
    is_only_here,
    new_memory,
    placed_on,
    reinterpreted,
    storage_of,
    unowned,
    whole_of,
)
from retrograd.errors import Refusal

#: records a function for these inputs, and empties the list; returns what replays it, and its results.
Record = Callable[[list[Any]], tuple[Any, Sequence[Any]]]


#: less is always copied: a loss is held until there is another one.
LITTLE = 2**16


#: nobody: greater than the number of any recording.
NOBODY = 2**63
#: so often is it found that something is to be recorded while memory that was given away is in use, before
#: nothing is given away in a pool any more.
MOST_UNDONE = 3
#: pools without recordings, of which somebody holds results.
_lingering: set[Pool] = set()


class Pool:
    """Memory of recordings, which are numbered in the order in which they are made.

    A recording allocates where no earlier one has its results, and works where later ones have theirs. What a
    forward saved may be *donated* to the recording of its backward, which frees it as it goes on. From then
    on the result lies there without owning the memory, and other recordings work there too. So a recording
    can be replayed if nobody holds results of its own, of a later one, or such as were donated before it was
    made.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle  #: of the recorder.
        self._count = self._undone = 0
        self._entered: dict[int, tuple[weakref.ref[Recorded], Results]] = {}

    def next_number(self) -> int:
        """That of a recording which is made now."""
        for pool in [self, *_lingering]:
            pool.let_go()
        self._count += 1
        return self._count

    def enter(self, recorded: Recorded, number: int) -> None:
        """Take note of one more recording."""
        self._entered[number] = weakref.ref(recorded), recorded.results
        weakref.finalize(recorded, self._linger).atexit = False

    def in_the_way(self, number: int, given: Mapping[int, int]) -> list[Results]:
        """The results that somebody holds, and that a replay of recording `number` would overwrite. Of
        storages that were donated to it, the `given` holders do not count: they are its inputs."""
        self.let_go()
        return [one for place, (_, one) in self._entered.items() if one.is_in_the_way(place, number, given)]

    def is_shared(self, number: int, given: Mapping[int, int]) -> bool:
        """Whether somebody besides the `given` holds what was donated to recording `number`."""
        return any(one.is_shared(number, given) for _, one in self._entered.values())

    def donatable(self, inputs: list[Any], places: Iterable[int]) -> set[int]:
        """Of `places`, those of inputs that were saved here, and that nobody else holds."""
        if self._undone >= MOST_UNDONE:
            return set()
        given = held_here(inputs, places)
        free = {storage for _, one in self._entered.values() for storage in one.saved_but_for(given)}
        return {i for i in places if isinstance(inputs[i], torch.Tensor) and storage_of(inputs[i]) in free}

    def donate(self, inputs: list[Any], places: Collection[int], number: int) -> None:
        """Leave the memory of `inputs` at `places` to recording `number`, if nobody else owns it: the list, and
        the results that they are, get tensors that do not."""
        tensors = {place: inputs[place] for place in places}
        aliases: dict[int, torch.Tensor] = {}
        for _, one in self._entered.values():
            aliases |= one.give({storage_of(tensor) for tensor in tensors.values()}, number)
        for place, tensor in tensors.items():
            inputs[place] = placed_on(aliases[storage_of(tensor)].untyped_storage(), tensor)

    def is_unowned_in_use(self) -> bool:
        """Whether somebody holds results that lie in memory which is nobody's: what is recorded now could
        work there. Then recordings in which it is somebody's are made in place of these."""
        self.let_go()
        found = [one for _, one in self._entered.values() if one.is_unowned_held()]
        for one in found:
            one.is_outdated = True
        self._undone += bool(found)
        return bool(found)

    def gives(self, storage: int) -> bool:
        """Whether a recording hands out this storage."""
        return any(one.hands_out(storage) for _, one in self._entered.values())

    def let_go(self) -> None:
        """Forget recordings that are gone, unless somebody holds what they gave: its memory is free then."""
        for place, (recorded, results) in list(self._entered.items()):
            if recorded() is None and not results.is_held():
                del self._entered[place]
        if all(recorded() is not None for recorded, _ in self._entered.values()):
            _lingering.discard(self)

    def _linger(self) -> None:
        """A recording is gone: stay, if somebody holds what one that is gone gave. It may own no memory."""
        if any(recorded() is None and results.is_held() for recorded, results in list(self._entered.values())):
            _lingering.add(self)


class Recorded:
    """A recording, the addresses of the inputs that it reads where they are, and buffers for the others.

    Args:
        inputs: of the call. Those that are donated are replaced.
        copied: places of inputs that are copied.
        saved: places of results that always stay.
        donated: places of inputs whose memory it may work in.
        pool: in which it is recorded.
        leaving: places of results that are copied though they are large, and may grow; None: all are.

    Attributes:
        addresses: of the inputs that it was recorded for; 0 for None. copied: the places of those that are
            copied. results: how they are handed out. replays: how many there were.

    Raises:
        Exception: it cannot be recorded; nothing was run.
    """

    def __init__(  # noqa: PLR0913 - what a recording depends on
        self,
        record: Record,
        inputs: list[Any],
        copied: Collection[int],
        saved: Collection[int],
        donated: Collection[int],
        pool: Pool,
        leaving: set[int] | None,
    ) -> None:
        self.copied, self._pool, self.replays, self._donated = copied, pool, 0, donated
        tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        self._copied = [_Copied.of(i, inputs[i]) for i in tensors if i in copied]
        buffers = {one.place: one.buffer for one in self._copied}
        self._static = [i for i in tensors if i not in buffers]
        self._layouts = {i: geometry_of(inputs[i]) for i in tensors}
        self.addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else 0 for v in inputs]
        self._number = pool.next_number()
        given = [buffers.get(i, value) for i, value in enumerate(inputs)]
        pool.donate(inputs, donated, self._number)
        kept = [None if i in donated else value for i, value in enumerate(given)]
        graph, outputs = record(given)
        self._replay = graph.replay
        self.results = Results(outputs, kept, saved, leaving)
        del outputs  # who holds one from now on is told from that
        self.results.settle()
        pool.enter(self, self._number)
        groups = by_dtype([one.target for one in self._copied])
        self._groups = [[self._copied[i] for i in group] for group in groups]

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
            copy_each([one.target for one in group], [one.source(inputs[one.place]) for one in group])
        self.replays += 1
        self._replay()
        return self.results.hand_out(inputs)


class _Copied(NamedTuple):
    """An input that is copied: the function gets `buffer`; `target` is its memory as it is written."""

    place: int
    buffer: torch.Tensor
    target: torch.Tensor

    @staticmethod
    def of(place: int, value: torch.Tensor) -> _Copied:
        """A buffer like `value`. One whose elements do not fill their memory, each place once, is copied as a
        row from its first to its last element."""
        with torch.inference_mode(False):
            make = new_memory(value.device)
            buffer = make(tuple(value.shape), tuple(value.stride()), value.dtype)
        return _Copied(place, buffer, buffer if is_dense(buffer) else whole_of([buffer]))

    def source(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, as it is read."""
        return value if self.target is self.buffer else whole_of([value])


def held_here(inputs: list[Any], places: Iterable[int]) -> Counter[int]:
    """How many of the tensors at `places` hold each storage. What others refer to does not count."""
    return Counter(storage_of(inputs[i]) for i in places if is_only_here(inputs, i))


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
        is_outdated: whether there is to be another recording, which copies what this one leaves where it is, or
            in which what was donated is owned again.

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
        self._layouts = [(tuple(s.shape), tuple(s.stride()), s.dtype) for s in self._sources]
        self._by_dtype = by_dtype(self._sources)
        self._where = self._addresses()
        #: the numbers of the recordings that each was donated to, and the least of them.
        self._until, self._least = [NOBODY] * len(self._staying), NOBODY
        self._storages: list[int] = []
        self._at_rest: list[int] = []
        #: whether they were handed out since nobody was found to hold them.
        self._is_out = False

    def settle(self) -> None:
        """Nobody but the recording holds the results now: who does later is told from that."""
        self._storages = [storage_of(tensor) for _, tensor in self._staying]
        self._at_rest = holders(self._storages)

    @property
    def has_visible(self) -> bool:
        """Whether results stay that the user gets."""
        return len(self._staying) > self._saved

    def is_held(self) -> bool:
        """Whether somebody holds what stays, or has given it other memory."""
        return bool(self._held())

    def is_saved_held(self) -> bool:
        """Whether somebody holds what was saved in the last replay."""
        return any(i < self._saved for i in self._held())

    def is_unowned_held(self) -> bool:
        """Whether somebody holds what has been donated."""
        return self._least < NOBODY and any(self._until[i] < NOBODY for i in self._held())

    def is_in(self, storages: Collection[int]) -> bool:
        """Whether some of what the user gets lies in these storages."""
        return any(storage in storages for storage in self._storages[self._saved :])

    def hands_out(self, storage: int) -> bool:
        """Whether something that stays lies in this storage."""
        return storage in self._storages

    def is_in_the_way(self, own: int, number: int, given: Mapping[int, int]) -> bool:
        """As `Pool.in_the_way`, of the results of recording `own`."""
        if own < number < self._least:
            return False
        return any(
            own >= number or self._until[i] < number or (self._until[i] == number and self._is_beside(i, given))
            for i in self._held()
        )

    def is_shared(self, number: int, given: Mapping[int, int]) -> bool:
        """As `Pool.is_shared`."""
        return number in self._until and any(
            self._until[i] == number and self._is_beside(i, given) for i in self._held()
        )

    def saved_but_for(self, given: Mapping[int, int]) -> set[int]:
        """Of the storages `given`, those of saved results of which the given holders are all."""
        return {
            self._storages[i]
            for i in self._held()
            if i < self._saved and self._until[i] == NOBODY and not self._is_beside(i, given)
        }

    def give(self, storages: Collection[int], number: int) -> dict[int, torch.Tensor]:
        """Own those of the storages no more that are saved; returns what lies in their memory from now on."""
        places = [i for i in range(self._saved) if self._storages[i] in storages]
        aliases = {self._storages[i]: unowned(self._staying[i][1]) for i in places}
        given = {self._storages[i]: i for i in places}
        for i in places:
            place, tensor = self._staying[i]
            self._staying[i] = place, placed_on(aliases[self._storages[i]], tensor)
            self._until[i], self._least = number, min(number, self._least)
        aliases.clear()
        for i in places:
            self._storages[i] = storage_of(self._staying[i][1])
            self._at_rest[i] = holders([self._storages[i]])[0]
        return {storage: self._staying[i][1].data for storage, i in given.items()}

    def leave(self) -> None:
        """Have what the user holds copied by the next recording; if it comes to that again, all."""
        found = {self._staying[i][0] for i in self._held() if i >= self._saved}
        if self.is_outdated or self._leaving is None or not found:
            return
        self._leaving |= {place for place, _ in self._staying[self._saved :]} if self._leaving else found
        self.is_outdated = True

    def _held(self) -> list[int]:
        """Which of what stays somebody holds, or has given other memory."""
        if not self._is_out:
            return []
        now, where = holders(self._storages), self._addresses()
        if now == self._at_rest and where == self._where:
            self._is_out = False
            return []
        moved = {i + self._saved for i, (is_, was) in enumerate(zip(where, self._where, strict=True)) if is_ != was}
        return [i for i, (is_, was) in enumerate(zip(now, self._at_rest, strict=True)) if is_ != was or i in moved]

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for _, tensor in self._staying[self._saved :]]

    def _is_beside(self, i: int, given: Mapping[int, int]) -> bool:
        """Whether others hold it than the `given`."""
        return holders([self._storages[i]])[0] != self._at_rest[i] + given.get(self._storages[i], 0)

    def hand_out(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of the replay that has just been made with `inputs`."""
        self._is_out = True
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
