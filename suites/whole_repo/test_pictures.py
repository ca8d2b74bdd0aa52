"""The pictures of the documents are those that their source draws, and each is shown with a description."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def drawer() -> Any:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_source_draws() -> None:
    drawn = drawer().pictures()
    assert {path: path.read_text() for path in (DOCS / "explanations").glob("*.svg")} == drawn


def test_no_box_covers_another_or_leaves_the_picture() -> None:
    for path, text in drawer().pictures().items():
        page, *boxes = [box for box in xml.fromstring(text).iter() if box.tag.endswith("rect")]
        places = [[float(box.get(key, 0)) for key in ("x", "y", "width", "height")] for box in boxes]
        size = [float(page.get(key, 0)) for key in ("width", "height")]
        for i, (x, y, wide, high) in enumerate(places):
            assert min(x, y, size[0] - x - wide, size[1] - y - high) >= 0, (path, i)
            for left, top, other_wide, other_high in places[:i]:
                assert x >= left + other_wide or left >= x + wide or y >= top + other_high or top >= y + high


def test_each_picture_is_shown_with_a_description() -> None:
    shown = [
        (text, name)
        for page in DOCS.rglob("*.md")
        for text, name in re.findall(r"!\[([^\]]*)\]\((\w+\.svg)\)", page.read_text())
    ]
    assert sorted(name for _, name in shown) == sorted(path.name for path in drawer().pictures())
    assert all(len(text.split()) > 5 for text, _ in shown)
