"""The page of the zoo says what the files say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def zoo() -> Any:
    spec = importlib.util.spec_from_file_location("zoo_page", ROOT / "suites/parity/zoo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_files() -> None:
    module = zoo()
    assert (ROOT / "docs/zoo.md").read_text() == module.page(module.read())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "suites/parity").glob("zoo_*.json")), ids=lambda path: path.stem
)
def test_nothing_crashes_in_the_zoo(path: Path) -> None:
    verdicts = json.loads(path.read_text())["verdicts"]
    assert len(verdicts) >= 40
    assert not {verdict for found in verdicts.values() for verdict in found.values()} & {
        "CRASH",
        "HANG",
        "TIMEOUT",
    }
