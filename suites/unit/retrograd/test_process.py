"""State of the process that several threads meet in."""

from __future__ import annotations

import threading

from retrograd.process import cached_property


class Slow:
    def __init__(self, wait: threading.Event) -> None:
        self.wait = wait

    @cached_property
    def value(self) -> bool:
        return self.wait.wait(30)


def test_nobody_waits_for_the_property_of_another_object() -> None:
    """An interrupt may end a thread inside, and what it holds is held for ever."""
    asked, free = threading.Event(), threading.Event()
    free.set()
    slow = Slow(asked)
    thread = threading.Thread(target=lambda: slow.value, daemon=True)
    thread.start()
    other: list[bool] = []
    second = threading.Thread(target=lambda: other.append(Slow(free).value), daemon=True)
    second.start()
    second.join(10)
    asked.set()
    thread.join(10)
    assert other == [True]
    assert vars(slow)["value"] is slow.value is True
