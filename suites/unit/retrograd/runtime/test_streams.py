"""Which streams a plan waits for, with a device that is made up: the real ones are in `live/test_cuda.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retrograd.runtime.streams import SideStreams, next_sequence_number

OLD, NEW = (lambda: 0), next_sequence_number


class Device:
    """One device, whose current stream is a thread's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here, self.streams = threading.local(), SideStreams()
        monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=0: self.current)

    @property
    def current(self) -> Any:
        return getattr(self.here, "stream", stream(0))

    def switch(self, to: Any) -> None:
        def original(one: Any) -> None:
            self.here.stream = one

        self.streams._switching(original, to)

    @contextmanager
    def on(self, one: Any) -> Iterator[None]:
        before = self.current
        self.switch(one)
        yield
        self.switch(before)

    def waits_for(self, oldest: Any = OLD) -> list[int]:
        return sorted(handle for _, handle in self.streams.of_nodes(oldest))


def stream(handle: int) -> Any:
    return SimpleNamespace(cuda_stream=handle, device_index=0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def node() -> None:
    torch.ones(1, requires_grad=True).sin()


def test_a_stream_on_which_no_node_was_made_is_not_waited_for(device: Device) -> None:
    with device.on(stream(1)):
        pass
    node()
    with device.on(stream(1)):
        assert device.waits_for() == []
    assert device.streams.any


def test_a_stream_on_which_a_node_was_made_is_waited_for(device: Device) -> None:
    with device.on(stream(1)), device.on(stream(2)):
        node()
    assert device.waits_for() == [2]
    with device.on(stream(3)):
        node()
        assert device.waits_for() == [2, 3]


def test_a_stream_that_is_current_on_another_thread_is_waited_for(device: Device) -> None:
    def forward() -> None:
        device.switch(stream(1))
        node()

    device.switch(stream(0))
    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    assert device.waits_for() == [1]


def test_a_backward_whose_nodes_are_newer_waits_for_nothing(device: Device) -> None:
    with device.on(stream(1)):
        node()
    assert device.waits_for(NEW) == []
    with device.on(stream(1)):
        node()
    assert device.waits_for(lambda: next_sequence_number() - 1) == [1]
