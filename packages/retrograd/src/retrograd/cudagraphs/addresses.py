"""Tracks the addresses of a function's inputs over its last calls.

In: the addresses and sizes of the inputs of each call that no recording fits. Out: which inputs to copy from
now on, and whether a call repeats an earlier one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from retrograd.policy import REMEMBERED


class AddressHistory:
    """The input addresses of the last calls.

    Args:
        copyable: up to this many bytes of moving inputs are copied; for more, we record again.
        written: indices of inputs that the function writes to. We never copy these.

    Attributes:
        copied: indices of inputs that are copied, so that their addresses no longer matter.
    """

    def __init__(self, copyable: int, written: Collection[int] = ()) -> None:
        self.copied: frozenset[int] = frozenset()
        self._copyable, self._written = copyable, frozenset(written)
        self._last: deque[list[int]] = deque(maxlen=REMEMBERED)
        self._settled: set[int] = set()

    def note(self, addresses: list[int], sizes: Sequence[int], given: Collection[int] = ()) -> bool:
        """Add a call that no recording fits, and return whether to record it.

        We record it if its addresses have come before; inputs that are copied, or in `given`, do not count.
        Inputs that have moved since the last call are copied from now on, if they are small.

        Args:
            addresses: of the inputs.
            sizes: of the inputs, in bytes.
            given: indices of inputs that a recording produced.
        """
        if self._last:
            self._copy(self._changed(addresses, self._last[-1]) - set(given), sizes)
        is_repeated = any(not self._changed(addresses, before) - set(given) for before in self._last)
        self._last.append(addresses)
        return is_repeated

    def settle(self, given: Collection[int]) -> bool:
        """Stop copying the inputs in `given`: a recording produced them, and they will have that address
        again. If such an input moves again, we copy it for good. Returns whether any input changed."""
        settled = self.copied.intersection(given) - self._settled
        self._settled |= settled
        self.copied -= settled
        return bool(settled)

    def alternate(self, places: set[int], sizes: Sequence[int]) -> None:
        """Copy the inputs at `places` for good, if they are small: recordings produce them in turn."""
        self._copy(places, sizes)
        self._settled |= places

    def _copy(self, places: set[int], sizes: Sequence[int]) -> None:
        wanted = self.copied | (places - self._written)
        if sum(sizes[i] for i in wanted) <= self._copyable:
            self.copied = wanted

    def _changed(self, addresses: list[int], before: list[int]) -> set[int]:
        pairs = enumerate(zip(addresses, before, strict=True))
        return {i for i, (now, then) in pairs if now != then and i not in self.copied}
