"""One recording of a call, for inputs at certain places.

In: the inputs of a call that is recorded. Out: `Recorded`, which says whether it fits the inputs of a later
call, and gives their results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from retrograd._torch.tensor import addresses_are, is_dense, layout_of, new_memory, whole_of
from retrograd._torch.trace import copy_each
from retrograd.cudagraphs.recorder import Boxed, Recorder
from retrograd.cudagraphs.results import Results


class Recorded:
    """A recording, the addresses of the inputs that it reads where they are, and buffers for the others.

    Args:
        recorder, device: where to record.
        fn: the function.
        inputs: tensors, or None.
        copied: places of inputs that are copied into a buffer before each replay.
        kept: places of results that stay where the recording writes them.

    Attributes:
        addresses: of the inputs that it was recorded for; 0 for None.

    Raises:
        Exception: it cannot be recorded; nothing was run.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        fn: Boxed,
        inputs: Sequence[Any],
        copied: Collection[int],
        kept: Collection[int],
    ) -> None:
        tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        self._copied = [_Copied.of(i, inputs[i]) for i in tensors if i in copied]
        buffers = {one.place: one.buffer for one in self._copied}
        self._static = [i for i in tensors if i not in buffers]
        self._layouts = {i: layout_of(inputs[i]) for i in tensors}
        self.addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else 0 for v in inputs]
        given = [buffers.get(i, value) for i, value in enumerate(inputs)]
        recording = recorder.record(fn, given, device, is_common=not kept)
        self._replay = recording.replay
        self._results = Results(recording.take_outputs(), given, kept)
        self._results.settle()
        self._groups = _by_dtype(self._copied)

    def fits(self, inputs: list[Any], loose: Sequence[int]) -> bool:
        """Whether a replay reads these inputs. Only those at `loose` may have other sizes and strides than
        the recorded ones."""
        if any(layout_of(inputs[i]) != self._layouts[i] for i in loose if i in self._layouts):
            return False
        return addresses_are(inputs, self.addresses, self._static)

    @property
    def is_busy(self) -> bool:
        """Whether somebody still holds what the last replay wrote."""
        return self._results.are_held

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """The results for `inputs`, which fit."""
        for group in self._groups:
            copy_each([one.target for one in group], [one.source(inputs[one.place]) for one in group])
        self._replay()
        return self._results.hand_out(inputs)


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


def _by_dtype(copied: Sequence[_Copied]) -> list[list[_Copied]]:
    groups: dict[torch.dtype, list[_Copied]] = {}
    for one in copied:
        if one.target.numel():
            groups.setdefault(one.target.dtype, []).append(one)
    return list(groups.values())
