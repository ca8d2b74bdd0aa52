"""A browser for all tests of pages. Without playwright, tests that ask for it are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser.exhibits import BROWSER


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()
