"""What makes recordings.

In: a function and its inputs. Out: something that does the same again. `CudaRecorder` is the real one; tests
have one without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

#: takes a list of inputs, which it may empty.
Boxed = Callable[[list[Any]], Sequence[Any]]


class Recording(Protocol):
    """A function as it ran once."""

    def take_outputs(self) -> Sequence[Any]:
        """Its results, which it holds no more. Tensors that belong to no input are written by each `replay`,
        the first time by the first one."""
        ...

    def replay(self) -> None:
        """Read the inputs where they were, and write the results."""
        ...


class Recorder(Protocol):
    """Makes recordings on devices of one type."""

    @property
    def device_type(self) -> str: ...

    def why_not_now(self) -> str | None:
        """Which state of this thread speaks against recording and replaying; None if none does."""
        ...

    def stream(self, device: torch.device) -> int:
        """What tells the stream, to which replays are given now, from others."""
        ...

    def record(self, fn: Boxed, inputs: Sequence[Any], device: torch.device, is_common: bool) -> Recording:
        """Record a call of `fn`; `is_common`: in memory that it shares with others, except its results.

        Raises:
            Exception: it cannot be recorded. Nothing was run then.
        """
        ...
