"""A function that records itself, and is replayed where a recording fits.

In: a boxed pure function of tensors on one device, of static sizes. Out: the same function. The first calls
run as they are; then a call is recorded for the addresses of its inputs, which are the same again and again
where memory comes from torch's allocator and the program repeats itself. Whatever speaks against a replay,
the call runs as it is, and the reason is told once.

Recordings read their inputs where they were. Inputs that come from elsewhere are copied to a place of their
own, if they are few, or not much more than what a recording gives: another one would hold that once more.

Recordings of a stream lie in one pool, so that they work in the same memory. `results` says which results are
copied out of it. While somebody holds one that is not, nothing is replayed that would overwrite it: what is
to be called while he does is recorded once more, behind it. What is recorded while memory that was given away
is in use, as an input that moved has it, lies in another pool: the first one stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd.cudagraphs.addresses import AddressHistory
from retrograd.cudagraphs.program import Program
from retrograd.cudagraphs.recorded import Givers, Places, Recorded
from retrograd.cudagraphs.refusals import refusal
from retrograd.errors import Reason, Refusal, first_line
from retrograd.events import counters
from retrograd.graph.emit import Boxed
from retrograd.policy import (
    FIRST_REPLAYS,
    MOST_AT_ONCE,
    MOST_INVERSIONS,
    MOST_LARGE,
    MOST_RECORDINGS,
    MOST_WAITS,
    MUCH,
    RARE,
    SEPARATE_POOL_AFTER,
    TRIED,
    WARM_UPS,
)
from retrograd.process import ForkSafeLock, forgotten_by_reset
from retrograd.runtime.tensor import geometry_of, memory_of, storage_of

#: codes of reasons that concern one call.
NOT_NOW, HELD = "cuda-graphs-not-now", "cuda-graphs-held"


@dataclass(eq=False)
class SharedMemory:
    """What a forward and its backwards share.

    Attributes:
        inversions: how often one of them was recorded once more because of the order of calls.
        given_up: recordings of the forward that are gone. What backwards read there is elsewhere now.
        elsewhere: by name, the device of results that the forward, run as it is, gives on another one than
            in a recording. Fused attention hands out the state of the generator so; its backward, run as it
            is, reads it there.
    """

    inversions: int = 0
    given_up: int = 0
    other_devices: dict[Hashable, torch.device] = field(default_factory=dict)

    def restore_saved(self, inputs: list[Any], results: Mapping[int, Hashable]) -> None:
        """Move `inputs` of a backward that is not replayed to where it reads them. `results` as in
        `Values`."""
        for place, of in results.items():
            if of in self.other_devices:
                inputs[place] = inputs[place].to(self.other_devices[of])


@dataclass(frozen=True)
class Values:
    """What is known of a function's inputs and results.

    Attributes:
        kept: by place, names of results that are saved for a backward, or for what runs next.
        loose: places of inputs that may have other strides in another call; those of others must not change.
        results: by place of an input that is such a result, its name.
        copyable: bytes. So many are copied to it before there is another recording.
        written: places of inputs that it writes to.
        custom: the operators that torch does not define. One that waits for the device cannot be recorded.
        memory: of a forward and its backwards; None: it is neither, and all its results are copied.
    """

    kept: Mapping[int, Hashable] = field(default_factory=dict)
    loose: Sequence[int] = ()
    results: Mapping[int, Hashable] = field(default_factory=dict)
    copyable: int = 0
    written: Collection[int] = ()
    custom: frozenset[str] = frozenset()
    memory: SharedMemory | None = None


#: sets of custom operators: some of each could not be recorded; all of these could be.
_failed: set[frozenset[str]] = set()
_proven: set[str] = set()


@forgotten_by_reset
def _forget() -> None:
    _failed.clear()
    _proven.clear()


def has_failed(operator: str) -> bool:
    """Whether this custom operator, or one beside it, could not be recorded."""
    return operator not in _proven and any(operator in failed for failed in _failed)


class GraphedCall:
    """`fn`, recorded and replayed. It writes to no inputs but those that `values` name.

    Args:
        values: of `fn`.
        tell: told of each call why it runs as it is.

    Attributes:
        is_refused: whether it can not be recorded.
    """

    def __init__(
        self,
        fn: Boxed,
        program: Program,
        device: torch.device,
        values: Values,
        tell: Callable[[Reason], None] = lambda reason: None,
    ) -> None:
        self._fn, self._program, self._device = fn, program, device
        self._recorder = program.recorder
        self._kept, self._loose, self._tell = values.kept, tuple(values.loose), tell
        self._most = MOST_LARGE if values.copyable > MUCH else MOST_RECORDINGS
        self._history = AddressHistory(values.copyable, values.written)
        self._memory = values.memory or SharedMemory()
        self._results, self._custom = values.results, values.custom
        self._lock = ForkSafeLock()
        #: the oldest first: of several that fit it is taken, so that what reads its results finds them there.
        self._recordings: list[Recorded] = []
        #: places of results that users have held for longer than a call; None: none stays.
        self._leaving: set[int] | None = None if values.memory is None else set()
        #: `SharedMemory.given_up` at the last recording.
        self._given_up = 0
        #: calls that no recording fitted, recordings, and the number of the call of the last one
        self._calls = self._made = self._recorded_at = 0
        self._replays = self._waits = self._made_at_once = 0
        self._stream: int | None = None
        #: whether no more recordings are made.
        self._is_over = False
        self.is_refused = False
        program.enter(self)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """The results; `inputs` is emptied."""
        if self.is_refused or self._is_no_time() or not self._lock.take_if_free():
            return self._plainly(inputs)
        try:
            with self._program.replaying:  # others neither overwrite nor hand out what is looked at here
                self._program.runs(self)
                if (recorded := self._recorded_for(inputs)) is not None:
                    self._recorder.wait_for_streams()
                    results = recorded(inputs)
                    inputs.clear()
                    self._replays += 1
                    counters["cuda_graph_replays"] += 1
                    return results
        finally:
            self._lock.release()
        return self._plainly(inputs)

    @property
    def is_recorded(self) -> bool:
        """Whether a recording is held."""
        return bool(self._recordings)

    def _is_no_time(self) -> bool:
        if (why := self._recorder.why_not_now()) is not None:
            self._tell(refusal(NOT_NOW, why))
        return why is not None

    def _plainly(self, inputs: list[Any]) -> Sequence[Any]:
        counters["cuda_graph_plain_calls"] += 1
        self._memory.restore_saved(inputs, self._results)
        results = self._fn(inputs)
        for place, name in self._kept.items():
            value = results[place]
            if isinstance(value, torch.Tensor) and value.device != self._device:
                self._memory.other_devices[name] = value.device
        return results

    def _recorded_for(self, inputs: list[Any]) -> Recorded | None:
        """The recording to replay; None if the function is to run as it is."""
        self._give_up([recorded for recorded in self._recordings if recorded.results.is_outdated])
        recorded = next((one for one in self._recordings if self._is_free(one, inputs)), None)
        is_young = recorded is None or recorded.replays < FIRST_REPLAYS
        if is_young and self._history.copied and self._history.settle(self._given(inputs)) and recorded:
            self._give_up([recorded])
            recorded = None
        if recorded is not None and self._may_replay(recorded, inputs):
            recorded.used = self._replays
            return recorded
        if recorded in self._recordings:
            return None  # it may be replayed later
        self._calls += 1
        if self._is_of_plain_forward(inputs):
            return None
        if (reason := self._why_not_recorded(inputs)) is not None:
            self._tell(reason)
            return None
        addresses = [0 if value is None else value.data_ptr() for value in inputs]
        sizes = [0 if value is None else value.nbytes for value in inputs]
        given = self._given(inputs)
        current = (one for one in self._recordings if one.copied == self._history.copied)
        are_held = any(one.fits(inputs, self._loose) for one in current)
        is_repeated = are_held or self._history.note(addresses, sizes, given)
        if self._calls < WARM_UPS:
            self._program.grows()
            return None
        if self._calls == WARM_UPS or not is_repeated or self._is_to_wait():
            return None
        givers = {i: (given[i], addresses[i]) for i in given.keys() - self._history.copied}
        is_other = bool(givers) and all(one.givers != givers for one in self._recordings)
        if (is_other or are_held) and self._made_at_once < MOST_AT_ONCE:
            self._made_at_once += 1
            return self._record(inputs, givers)
        if are_held:
            self._tell(_HELD)
            return None
        if self._calls - self._recorded_at < 2**self._made - 1:
            return None
        if self._made >= TRIED and self._replays * RARE < self._replays + self._calls:
            self._give_up([*self._recordings])
            self._is_over = True
            self._tell(_MOVING)
            return None
        self._made, self._recorded_at = self._made + 1, self._calls
        return self._record(inputs, givers)

    def _is_free(self, recorded: Recorded, inputs: list[Any]) -> bool:
        """Whether a replay reads these inputs, and nobody holds what it saved last."""
        return recorded.fits(inputs, self._loose) and not recorded.results.is_saved_held()

    def _is_to_wait(self) -> bool:
        """Whether there is no recording yet, and others still have to become warm."""
        if self._recordings or self._program.has_come_round or self._waits >= MOST_WAITS:
            return False
        self._waits += 1
        return True

    def _given(self, inputs: Sequence[Any]) -> dict[int, int]:
        """By place, where the storage of an input begins, if a recording gives it."""
        there = self._program.given()
        found = {i: memory_of(value) for i, value in enumerate(inputs) if value is not None}
        return {i: address for i, address in found.items() if address in there}

    def _is_of_plain_forward(self, inputs: Sequence[Any]) -> bool:
        """Whether some of `inputs` are where only a forward that was run as it is gives them."""
        other_devices = self._memory.other_devices
        return bool(other_devices) and any(
            of in other_devices and inputs[i].device == other_devices[of] for i, of in self._results.items()
        )

    def _may_replay(self, recorded: Recorded, inputs: list[Any]) -> bool:
        """Whether it can be replayed now; if that is so for good, it is given up."""
        if self._recorder.stream(self._device) != self._stream:
            self._tell(_OTHER_STREAM)
            return False
        own = recorded.results
        if own.has_visible and torch.is_inference_mode_enabled():
            return False  # they are no inference tensors
        if not (held := recorded.in_the_way(inputs)):
            return True
        if recorded.is_shared(inputs):
            self._tell(_HELD)
            return False
        given = {storage_of(value) for value in inputs if isinstance(value, torch.Tensor)}
        if any(one.is_saved_held() or (one.is_in(given) and one is not own) for one in held):
            if self._memory.inversions >= MOST_INVERSIONS:
                self._tell(_HELD)
                return False
            self._memory.inversions += 1
        else:
            for one in held:
                one.leave()
        self._give_up([recorded])
        return False

    def _give_up(self, recordings: Sequence[Recorded]) -> None:
        """These will not be replayed any more, and others may come soon."""
        for recorded in recordings:
            self._recordings.remove(recorded)
            self._made, self._made_at_once = max(0, self._made - 1), max(0, self._made_at_once - 1)
            self._memory.given_up += bool(self._kept)

    def restart(self) -> None:
        """Give up all recordings: others come in their place."""
        self._give_up([*self._recordings])

    def _why_not_recorded(self, inputs: Sequence[Any]) -> Reason | None:
        if (why := self._why_unlike(inputs)) is not None:
            return refusal(NOT_NOW, why)
        if self._is_over:
            return _MOVING
        if self._stream not in (None, self._recorder.stream(self._device)):
            return _OTHER_STREAM
        return None

    def _why_unlike(self, inputs: Sequence[Any]) -> str | None:
        for value in inputs:
            if value is not None and not isinstance(value, torch.Tensor):
                return f"an input is {type(value).__name__}, and no tensor"
            if value is not None and value.device != self._device:
                return f"an input is on {value.device}, and not on {self._device}"
            if value is not None and geometry_of(value) is None:
                return "an input is lazily conjugated or negated, sparse or batched"
        return None

    def _record(self, inputs: list[Any], givers: Givers) -> Recorded | None:
        """A new recording, made without running anything; None if it fails. Older ones go that read from
        where something came that is copied now, or where a forward no longer saves anything. Custom operators
        show in a pool of their own that they can be recorded: a failure may leave it unusable."""
        stream, copied, memory = self._recorder.stream(self._device), self._history.copied, self._memory
        unproven, key = self._custom - _proven, None
        is_stale = not self._kept and memory.given_up != self._given_up
        good = [] if is_stale else self._good(givers)
        memory.given_up += len(self._recordings) - len(good) if self._kept else 0
        self._recordings, self._given_up = good, memory.given_up

        def record(given: list[Any]) -> Any:
            return self._recorder.record(self._fn, given, self._device, into.handle)

        try:
            if any(failed <= self._custom for failed in _failed):
                names = ", ".join(sorted(self._custom))
                raise Refusal("not-recordable", f"{names} failed to be recorded before")
            separate = memory if memory.inversions >= SEPARATE_POOL_AFTER else None
            key, into = self._program.pool(self._device, stream, separate, unproven)
            donated = into.donatable(inputs, self._results.keys() - copied)
            places = Places(copied, donated, self._kept)
            recorded = Recorded(record, inputs, places, into, self._leaving)
            self._program.pools[key] = into
        except Exception as error:
            if not isinstance(error, Refusal):
                self._program.pools.pop(key, None)  # it may be unusable
                if unproven and not isinstance(error, torch.OutOfMemoryError):
                    _failed.add(unproven)
            self._is_over = True
            self.is_refused = not self._recordings  # older recordings stay good
            self._tell(refusal("cuda-graphs-failed", first_line(error)))
            return None
        _proven.update(unproven)
        self._stream, recorded.givers, recorded.used = stream, givers, self._replays
        counters["cuda_graph_recordings"] += 1
        self._recordings.append(recorded)
        return recorded

    def _good(self, givers: Givers) -> list[Recorded]:
        """The recordings that are held beside a new one: they copy the same inputs, what gives the others is
        there, and of those with the same `givers`, the ones used last, and those of which somebody holds what
        was saved."""
        good, copied = set[Recorded](), self._history.copied
        there = self._program.given()
        for old in sorted(self._recordings, key=lambda one: one.used, reverse=True):
            is_like = old.copied == copied and there.issuperset(address for address, _ in old.givers.values())
            is_rival = old.givers == givers and not old.results.is_saved_held()
            if is_like and (not is_rival or sum(o.givers == givers for o in good) < self._most - 1):
                good.add(old)
        return [old for old in self._recordings if old in good]


_OTHER_STREAM = refusal(NOT_NOW, "another stream is current than when it was recorded", "stay on one stream")
_HELD = refusal(
    HELD,
    "what an earlier call saved for its backward is still held, or a backward retains it",
    "run each backward before the next forward, and once",
)
_MOVING = refusal(
    "cuda-graphs-moving",
    "several recordings were made, and its inputs still come from other places",
    "nothing to do: results are the same",
)
