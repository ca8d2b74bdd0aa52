"""Whether it is worth recording a call for the addresses that its inputs have.

In: the addresses of each call that no recording fits. Out: whether to record now, and which inputs are to be
copied to a place of their own before each replay, because they come from another place almost every time.
"""

from __future__ import annotations

from collections import deque

#: how many calls without a recording are remembered.
REMEMBERED = 4


class AddressHistory:
    """The addresses of the last calls.

    Attributes:
        copied: places of inputs whose address does not matter any more.
    """

    def __init__(self) -> None:
        self.copied: frozenset[int] = frozenset()
        self._last: deque[list[int]] = deque(maxlen=REMEMBERED)

    def note(self, addresses: list[int]) -> bool:
        """Note a call that no recording fits; whether to record it: its addresses have come before, or they
        have been others each time, so that those which changed are copied from now on."""
        if any(not self._changed(addresses, before) for before in self._last):
            return True
        if len(self._last) < REMEMBERED - 1:
            self._last.append(addresses)
            return False
        for before in self._last:
            self.copy_what_differs(addresses, before)
        self._last.clear()
        return True

    def forget(self, addresses: list[int]) -> None:
        """There is a recording for these."""
        others = [before for before in self._last if self._changed(addresses, before)]
        self._last = deque(others, maxlen=REMEMBERED)

    def copy_what_differs(self, addresses: list[int], before: list[int]) -> None:
        """From now on, inputs whose addresses differ between the two are copied."""
        self.copied |= self._changed(addresses, before)

    def _changed(self, addresses: list[int], before: list[int]) -> set[int]:
        pairs = enumerate(zip(addresses, before, strict=True))
        return {i for i, (now, then) in pairs if now != then and i not in self.copied}
