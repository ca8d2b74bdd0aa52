"""Fixtures of the tests of retrograd: no capture, plan or warning survives a test.

Nor is a hook of an earlier test known. A hook that refers to its own graph is a cycle through C++, which
Python's collector does not see. So it stays for ever, and concerns all later graphs of a process in which
several threads were alive when it was registered.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import retrograd
from retrograd.live.capture import reentry


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    retrograd.reset()
    reentry._registered.clear()
    yield
    retrograd.reset()
