"""Fixtures of the tests of retrograd: no capture, plan or warning survives a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import retrograd


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    retrograd.reset()
    yield
    retrograd.reset()
