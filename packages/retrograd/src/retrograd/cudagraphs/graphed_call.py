"""Records a function as CUDA graphs, and replays the recording that fits a call.

In: a boxed pure function of tensors on one device, with static sizes. Out: the same function. Its first calls
run normally. Then we record a call for the addresses of its inputs. These repeat if memory comes from torch's
allocator and the program repeats itself. If anything prevents a replay, the call runs normally, and we report
the reason once.

A recording reads its inputs at their recorded addresses. If some inputs move, we copy them into buffers,
provided that they are small, or not much larger than the results: each further recording would hold its
results once more.

All recordings of a stream share one memory pool. `results` says which results are copied out of it. While a
caller still holds a result that lives in the pool, we must not replay a graph that overwrites it. A call made
meanwhile is recorded again, in memory after it. If donated memory is in use when we record (for example,
because an input moved, or a layer was skipped before), the recording goes into another pool, and the first
pool stays valid.
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

#: codes of the reasons that concern a single call.
NOT_NOW, HELD = "cuda-graphs-not-now", "cuda-graphs-held"


@dataclass(eq=False)
class SharedMemory:
    """State that a forward and its backwards share.

    Attributes:
        inversions: how often one of them was recorded again because of the order of calls.
        given_up: recordings of the forward that were dropped. Backwards that read their results are stale.
        other_devices: by name, results that a normal run of the forward returns on another device than a
            recording does, with that device. For example, fused attention returns the generator's state
            there, and a normal run of its backward reads it there.
    """

    inversions: int = 0
    given_up: int = 0
    other_devices: dict[Hashable, torch.device] = field(default_factory=dict)

    def restore_saved(self, inputs: list[Any], results: Mapping[int, Hashable]) -> None:
        """Move `inputs` to the devices where a backward that is not replayed reads them. `results` as in
        `Values`."""
        for place, of in results.items():
            if of in self.other_devices:
                inputs[place] = inputs[place].to(self.other_devices[of])


@dataclass(frozen=True)
class Values:
    """What we know about a function's inputs and results.

    Attributes:
        kept: by index, the names of results that are saved for a backward, or for the next stretch.
        loose: indices of the inputs whose strides may differ between calls. Those of other inputs must not.
        results: by index, the names of inputs that are such results.
        copyable: up to this many bytes of moving inputs are copied; for more, we record again.
        written: indices of the inputs that the function writes to.
        custom: operators that torch does not define. If one waits for the device, it cannot be recorded.
        memory: shared by a forward and its backwards. None if the function is neither; then we copy all its
            results.
    """

    kept: Mapping[int, Hashable] = field(default_factory=dict)
    loose: Sequence[int] = ()
    results: Mapping[int, Hashable] = field(default_factory=dict)
    copyable: int = 0
    written: Collection[int] = ()
    custom: frozenset[str] = frozenset()
    memory: SharedMemory | None = None


#: custom operators: sets of which at least one could not be recorded; operators that could be recorded.
_failed: set[frozenset[str]] = set()
_proven: set[str] = set()


@forgotten_by_reset
def _forget() -> None:
    _failed.clear()
    _proven.clear()


def has_failed(operator: str) -> bool:
    """Whether recording failed for this custom operator, or for another one in the same graph."""
    return operator not in _proven and any(operator in failed for failed in _failed)


class GraphedCall:
    """Records and replays `fn`. `fn` may write only to the inputs that `values` names. Whole numbers among
    its inputs are the same in each call.

    Args:
        fn: the function.
        program: the program that calls it.
        device: the device of its tensors.
        values: what we know about its inputs and results.
        tell: called with the reason of each call that runs normally.
        kin: as in `Recorded`.

    Attributes:
        is_refused: True if the function cannot be recorded.
    """

    def __init__(
        self,
        fn: Boxed,
        program: Program,
        device: torch.device,
        values: Values,
        tell: Callable[[Reason], None] = lambda reason: None,
        kin: Hashable = None,
    ) -> None:
        self._fn, self._program, self._device, self._kin = fn, program, device, kin
        self._recorder = program.recorder
        self._kept, self._loose, self._tell = values.kept, tuple(values.loose), tell
        self._most = MOST_LARGE if values.copyable > MUCH else MOST_RECORDINGS
        self._history = AddressHistory(values.copyable, values.written)
        self._memory = values.memory or SharedMemory()
        self._results, self._custom = values.results, values.custom
        self._lock = ForkSafeLock()
        #: oldest first. If several fit, we take the oldest, so that readers of its results find them there.
        self._recordings: list[Recorded] = []
        #: indices of results that callers held for longer than a call; None if no result stays in the pool.
        self._leaving: set[int] | None = None if values.memory is None else set()
        #: `SharedMemory.given_up` at the last recording.
        self._given_up = 0
        #: how many calls no recording fitted; how many recordings we made; the call of the last recording.
        self._calls = self._made = self._recorded_at = 0
        self._replays = self._waits = self._made_at_once = 0
        self._stream: int | None = None
        #: how many calls there were; whether two in a row read the same results of other recordings, as they
        #: never do if layers share the function.
        self._count, self._repeats = 0, False
        #: True if we make no more recordings.
        self._is_over = False
        self.is_refused = False
        program.enter(self)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Call the function. `inputs` is emptied."""
        if self.is_refused or self._is_no_time() or not self._lock.take_if_free():
            return self._plainly(inputs)
        try:
            with self._program.replaying:  # no other thread may overwrite or hand out results meanwhile
                self._program.runs(self)
                self._count += 1
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
        """Whether the call has a recording."""
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
        """The recording to replay; None if the function must run normally."""
        self._give_up([recorded for recorded in self._recordings if recorded.results.is_outdated])
        recorded = next((one for one in self._recordings if self._is_free(one, inputs)), None)
        is_young = recorded is None or recorded.replays < FIRST_REPLAYS
        if is_young and self._history.copied and self._history.settle(self._given(inputs)) and recorded:
            self._give_up([recorded])
            recorded = None
        if recorded is not None and self._may_replay(recorded, inputs):
            self._repeats |= bool(recorded.givers) and recorded.used == self._count - 1
            recorded.used = self._count
            return recorded
        if recorded in self._recordings:
            return None  # a later call may replay it
        self._calls += 1
        if self._is_of_plain_forward(inputs):
            return None
        if (reason := self._why_not_recorded(inputs)) is not None:
            self._tell(reason)
            return None
        addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in inputs]
        sizes = [value.nbytes if isinstance(value, torch.Tensor) else 0 for value in inputs]
        given = self._given(inputs)
        self._copy_alternating(inputs, sizes, given)
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
        """Whether a replay would read these inputs, and nothing refers to what its last replay saved."""
        return recorded.fits(inputs, self._loose) and not recorded.results.is_saved_held()

    def _is_to_wait(self) -> bool:
        """Whether to delay the first recording, because other functions are not warm yet."""
        if self._recordings or self._program.rounds or self._waits >= MOST_WAITS:
            return False
        self._waits += 1
        return True

    def _given(self, inputs: Sequence[Any]) -> dict[int, int]:
        """By index, the storage address of each input that a recording produced."""
        there = self._program.given()
        found = {i: memory_of(value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        return {i: address for i, address in found.items() if address in there}

    def _copy_alternating(self, inputs: list[Any], sizes: Sequence[int], given: Collection[int]) -> None:
        """Copy small inputs if only they differ from those of a recording, and other recordings produce them:
        for example, if a model skips layers at random, so that a layer has other ones before it in each step.
        One more recording would hold its results once more."""
        if not self._repeats:
            return
        there, moving = self._program.given(), set(given).difference(self._results)
        found = [
            moved
            for one in self._recordings
            if one.copied == self._history.copied
            and there.issuperset(address for address, _ in one.givers.values())
            and (moved := one.moved(inputs)) <= moving
            and moved
            and not one.results.is_saved_held()
        ]
        if found:
            self._history.alternate(set().union(*found), sizes)

    def _is_of_plain_forward(self, inputs: Sequence[Any]) -> bool:
        """Whether some of `inputs` are on a device where only a normal run of the forward puts them."""
        other_devices = self._memory.other_devices
        return bool(other_devices) and any(
            of in other_devices and inputs[i].device == other_devices[of] for i, of in self._results.items()
        )

    def _may_replay(self, recorded: Recorded, inputs: list[Any]) -> bool:
        """Whether we can replay it now. If we never can again, we drop it."""
        if self._recorder.stream(self._device) != self._stream:
            self._tell(_OTHER_STREAM)
            return False
        own = recorded.results
        if own.has_visible and torch.is_inference_mode_enabled():
            return False  # its results are not inference tensors
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
        """Drop these recordings, and allow new ones soon."""
        for recorded in recordings:
            self._recordings.remove(recorded)
            self._made, self._made_at_once = max(0, self._made - 1), max(0, self._made_at_once - 1)
            self._memory.given_up += bool(self._kept)

    def restart(self) -> None:
        """Drop all recordings, so that new ones replace them."""
        self._give_up([*self._recordings])

    def _why_not_recorded(self, inputs: Sequence[Any]) -> Reason | None:
        for value in inputs:
            if value is None or type(value) is int:
                continue
            if not isinstance(value, torch.Tensor):
                return refusal(NOT_NOW, f"an input is {type(value).__name__}, and no tensor")
            if value.device != self._device:
                return refusal(NOT_NOW, f"an input is on {value.device}, and not on {self._device}")
            if geometry_of(value) is None:
                return refusal(NOT_NOW, "an input is lazily conjugated or negated, sparse or batched")
        if self._is_over:
            return _MOVING
        if self._stream not in (None, self._recorder.stream(self._device)):
            return _OTHER_STREAM
        return None

    def _record(self, inputs: list[Any], givers: Givers) -> Recorded | None:
        """Make a new recording. Returns None if that fails.

        Recording runs nothing on the device. We drop older recordings if they read an input that is copied
        now, or results of a forward's recording that was dropped. Custom operators are first recorded in a
        separate pool: a failure may leave that pool unusable.
        """
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
            recorded = Recorded(record, inputs, places, into, self._leaving, self._kin)
            self._program.pools[key] = into
        except Exception as error:
            if not isinstance(error, Refusal):
                self._program.pools.pop(key, None)  # it may be unusable
                if unproven and not isinstance(error, torch.OutOfMemoryError):
                    _failed.add(unproven)
            self._is_over = True
            self.is_refused = not self._recordings  # older recordings stay valid
            self._tell(refusal("cuda-graphs-failed", first_line(error)))
            return None
        _proven.update(unproven)
        self._stream, recorded.givers, recorded.used = stream, givers, self._count
        counters["cuda_graph_recordings"] += 1
        self._recordings.append(recorded)
        return recorded

    def _good(self, givers: Givers) -> list[Recorded]:
        """The recordings that stay when we make a new one.

        They copy the same inputs, and the recordings that produce their other inputs still exist. Among those
        with the same `givers`, the most recently used stay, and those whose saved results are referenced.
        """
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
