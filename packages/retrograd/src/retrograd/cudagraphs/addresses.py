"""The addresses of a function's inputs in its last calls.

In: the addresses and sizes of the inputs of each call that no recording fits. Out: which inputs are copied
from now on, and whether a call is one that has come before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from retrograd.policy import REMEMBERED


class AddressHistory:
    """The addresses of the last calls.

    Args:
        copyable: bytes. So many are copied rather than recorded for once more.
        written: places of inputs that are written, and never copied.

    Attributes:
        copied: places of inputs whose address does not matter any more.
    """

    def __init__(self, copyable: int, written: Collection[int] = ()) -> None:
        self.copied: frozenset[int] = frozenset()
        self._copyable, self._written = copyable, frozenset(written)
        self._last: deque[list[int]] = deque(maxlen=REMEMBERED)
        self._settled: set[int] = set()

    def note(self, addresses: list[int], sizes: Sequence[int], given: Collection[int] = ()) -> bool:
        """Note a call that no recording fits, with the bytes of its inputs, and the places of those that a
        recording has `given`. Returns whether to record it: its addresses have come before, but for what is
        copied or given; and what else has changed since the last call is copied from now on, if that is
        little."""
        if self._last:
            changed = self._changed(addresses, self._last[-1]) - self._written - set(given)
            if sum(sizes[i] for i in self.copied | changed) <= self._copyable:
                self.copied |= changed
        is_repeated = any(not self._changed(addresses, before) - set(given) for before in self._last)
        self._last.append(addresses)
        return is_repeated

    def settle(self, given: Collection[int]) -> bool:
        """Copy no longer what a recording has `given`: it will come from there again. What was copied once
        more after that stays so. Returns whether there is any."""
        settled = self.copied.intersection(given) - self._settled
        self._settled |= settled
        self.copied -= settled
        return bool(settled)

    def _changed(self, addresses: list[int], before: list[int]) -> set[int]:
        pairs = enumerate(zip(addresses, before, strict=True))
        return {i for i, (now, then) in pairs if now != then and i not in self.copied}
