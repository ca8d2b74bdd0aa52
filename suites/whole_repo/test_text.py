"""What stands in committed files: a licence with each distribution, no machine's places, no leftovers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# Written in pieces, so that this file does not contain what it looks for.
PLACES = re.compile("|".join((r"(?<![\w.~-])/(?:work|root|home|Users|opt)/", r"(?<![\w.~-])/tm" + r"p\b")))
LEFTOVERS = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")


def matches(pattern: re.Pattern[str], files: list[Path], root: Path) -> list[str]:
    found = []
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(root)}:{n}: {line}" for n, line in enumerate(lines, 1) if pattern.search(line)
        ]
    return found


def test_no_place_of_one_machine_is_written_down(files: list[Path], root: Path) -> None:
    assert matches(PLACES, [path for path in files if path != Path(__file__).resolve()], root) == []


def test_nothing_is_left_for_later(files: list[Path], root: Path) -> None:
    assert matches(LEFTOVERS, files, root) == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("see /" + "tmp/x", True),
        ("in /" + "home/me/x", True),
        ("a/work/b", False),
        ("https://x.org/home/", False),
    ],
)
def test_the_search_for_places_finds_them(line: str, is_found: bool) -> None:
    assert bool(PLACES.search(line)) is is_found


def test_the_licence_travels_with_each_distribution(root: Path) -> None:
    text = (root / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License")
    assert "the retrograd authors" in text
    for distribution in ("packages/retrograd", "harness"):
        assert (root / distribution / "LICENSE").read_text() == text
