"""A recorder without a device: it remembers where the inputs were, and computes from there again.

What it records reads the memory that the inputs had, not the inputs of the call, and writes its results to
the same memory in each replay: a stale address, a missing copy and a result that is overwritten show as
wrong numbers, as they would on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Replayed:
    def __init__(self, fn, inputs: Sequence[Any], outputs: Sequence[Any], recorder: Recorder) -> None:
        # Aliases: replays read this memory whoever else holds it.
        self._memory = [value.data if isinstance(value, torch.Tensor) else value for value in inputs]
        self._fn, self._recorder = fn, recorder
        given = {value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)}
        self._written = [
            (place, output.data)
            for place, output in enumerate(outputs)
            if isinstance(output, torch.Tensor) and output.untyped_storage()._cdata not in given
        ]
        for _, output in self._written:
            if output.is_floating_point() and output.numel():
                _row(output).fill_(float("nan"))  # nothing has been computed yet

    def replay(self) -> None:
        self._recorder.replays += 1
        results = self._fn(list(self._memory))
        for place, output in self._written:
            _row(output).copy_(_row(results[place]))


class Recorder:
    """Records on the CPU. `now` is why it does not; `current` the stream."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.records = self.replays = 0
        self.common: list[bool] = []
        self.now: str | None = None
        self.current = 0

    def why_not_now(self) -> str | None:
        return self.now

    def stream(self, device: torch.device) -> int:
        return self.current

    def record(
        self, fn, inputs: Sequence[Any], device: torch.device, is_common: bool
    ) -> tuple[Replayed, Any]:
        outputs = fn(list(inputs))
        self.records += 1
        self.common.append(is_common)
        return Replayed(fn, inputs, outputs, self), outputs


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """All elements, each place of the memory once."""
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
