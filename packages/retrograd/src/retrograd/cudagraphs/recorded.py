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
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from retrograd._torch.tensor import (
    addresses_are,
    by_dtype,
    copy_each,
    geometry_of,
    holders,
    is_dense,
    new_memory,
    reinterpreted,
    storage_of,
    whole_of,
)
from retrograd.errors import Refusal

#: records a function for these inputs; returns what replays it, and its results.
Record = Callable[[Sequence[Any]], tuple[Any, Sequence[Any]]]


#: less is always copied: a loss is held until there is another one.
LITTLE = 2**16


class Pool:
    """Memory of recordings, which are numbered in the order in which they are made.

    A recording allocates where no earlier one has its results, and works where later ones have theirs. So it
    can be replayed if nobody holds results of its own, or of a later one.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle  #: of the recorder.
        self._count = 0
        self._entered: dict[int, tuple[weakref.ref[Recorded], Results]] = {}

    def enter(self, recorded: Recorded) -> int:
        """Take note of one more recording; returns its number."""
        self._count += 1
        self._entered[self._count] = weakref.ref(recorded), recorded.results
        return self._count

    def held_from(self, number: int) -> list[Results]:
        """The results of recording `number`, and of later ones, that somebody holds."""
        self.let_go()
        return [one for place, (_, one) in self._entered.items() if place >= number and one.is_held()]

    def gives(self, storage: int) -> bool:
        """Whether a recording hands out this storage."""
        return any(one.hands_out(storage) for _, one in self._entered.values())

    def let_go(self) -> None:
        """Forget recordings that are gone, unless somebody holds what they gave: its memory is free then."""
        for place, (recorded, results) in list(self._entered.items()):
            if recorded() is None and not results.is_held():
                del self._entered[place]


class Recorded:
    """A recording, the addresses of the inputs that it reads where they are, and buffers for the others.

    Args:
        saved: places of results that always stay.
        pool: in which it is recorded.
        leaving: places of results that are copied though they are large, and may grow; None: all are.

    Attributes:
        addresses: of the inputs that it was recorded for; 0 for None. copied: the places of those that are
            copied. results: how they are handed out. replays: how many there were.

    Raises:
        Exception: it cannot be recorded; nothing was run.
    """

    def __init__(
        self,
        record: Record,
        inputs: Sequence[Any],
        copied: Collection[int],
        saved: Collection[int],
        pool: Pool,
        leaving: set[int] | None,
    ) -> None:
        self.copied, self._pool, self.replays = copied, pool, 0
        tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        self._copied = [_Copied.of(i, inputs[i]) for i in tensors if i in copied]
        buffers = {one.place: one.buffer for one in self._copied}
        self._static = [i for i in tensors if i not in buffers]
        self._layouts = {i: geometry_of(inputs[i]) for i in tensors}
        self.addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else 0 for v in inputs]
        given = [buffers.get(i, value) for i, value in enumerate(inputs)]
        pool.let_go()
        graph, outputs = record(given)
        self._replay = graph.replay
        self.results = Results(outputs, given, saved, leaving)
        del outputs  # who holds one from now on is told from that
        self.results.settle()
        self._number = pool.enter(self)
        groups = by_dtype([one.target for one in self._copied])
        self._groups = [[self._copied[i] for i in group] for group in groups]

    def fits(self, inputs: list[Any], loose: Sequence[int]) -> bool:
        """Whether a replay reads these inputs. Only those at `loose` may have other sizes and strides than
        the recorded ones."""
        if any(geometry_of(inputs[i]) != self._layouts[i] for i in loose if i in self._layouts):
            return False
        return addresses_are(inputs, self.addresses, self._static)

    def overwritten(self) -> list[Results]:
        """The results that somebody holds, and that a replay would overwrite."""
        return self._pool.held_from(self._number)

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
        are_left: whether a new recording is to copy what this one leaves where it is.

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
        self.are_left = False
        self._constants: list[Any] = [None if isinstance(o, torch.Tensor) else o for o in outputs]
        self._passed: list[tuple[int, int]] = []
        #: results that are the one at an earlier place: whoever counts references must find them.
        self._same: list[tuple[int, int]] = []
        self._of_inputs: list[_View] = []
        #: what stays: what was saved, and what the user gets.
        self._saved: list[tuple[int, torch.Tensor]] = []
        self._visible: list[tuple[int, torch.Tensor]] = []
        #: what is copied, and where the copies stand among the results, or of which copies they are views.
        self._sources: list[torch.Tensor] = []
        self._direct: list[tuple[int, int]] = []
        self._of_copies: list[_View] = []
        self._leaving = leaving
        handed_out = {id(output) for place, output in enumerate(outputs) if place not in saved}
        self._divide(outputs, inputs, {place for place in saved if id(outputs[place]) not in handed_out})
        self._staying = [*self._saved, *self._visible]
        self._layouts = [(tuple(s.shape), tuple(s.stride()), s.dtype) for s in self._sources]
        self._by_dtype = by_dtype(self._sources)
        self._storages = [storage_of(tensor) for _, tensor in self._saved]
        self._seen = [storage_of(tensor) for _, tensor in self._visible]
        self._where = [tensor.data_ptr() for _, tensor in self._visible]
        self._at_rest: list[int] = []
        self._seen_at_rest: list[int] = []
        #: whether they were handed out since nobody was found to hold them.
        self._is_out = False

    def settle(self) -> None:
        """Nobody but the recording holds the results now: who does later is told from that."""
        self._at_rest, self._seen_at_rest = holders(self._storages), holders(self._seen)

    @property
    def has_visible(self) -> bool:
        """Whether results stay that the user gets."""
        return bool(self._visible)

    def is_held(self) -> bool:
        """Whether somebody holds what stays, or has given it other memory."""
        self._is_out = self._is_out and (self.is_saved_held() or self._is_visible_held())
        return self._is_out

    def is_saved_held(self) -> bool:
        """Whether somebody holds what was saved in the last replay."""
        return self._is_out and holders(self._storages) != self._at_rest

    def is_in(self, storages: Collection[int]) -> bool:
        """Whether some of what the user gets lies in these storages."""
        return any(storage in storages for storage in self._seen)

    def hands_out(self, storage: int) -> bool:
        """Whether something that stays lies in this storage."""
        return storage in self._storages or storage in self._seen

    def leave(self) -> None:
        """Have what the user holds copied by the next recording; if it comes to that again, all."""
        if self.are_left or self._leaving is None or not self._is_visible_held():
            return
        counts = zip(self._visible, holders(self._seen), self._seen_at_rest, strict=True)
        found = {place for (place, _), now, then in counts if now != then}
        self._leaving |= found if found and not self._leaving else {place for place, _ in self._visible}
        self.are_left = True

    def _is_visible_held(self) -> bool:
        return bool(self._visible) and (
            holders(self._seen) != self._seen_at_rest
            or [tensor.data_ptr() for _, tensor in self._visible] != self._where
        )

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

    def _divide(self, outputs: Sequence[Any], inputs: Sequence[Any], saved: Collection[int]) -> None:
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
                self._saved += members.items()
            elif self._may_stay(members):
                self._visible += members.items()
            else:
                self._copy(members)

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
