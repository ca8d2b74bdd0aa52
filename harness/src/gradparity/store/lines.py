"""Rows as lines of JSON, to read by other programs, to carry from machine to machine.

In: rows, or a file of lines. Out: a file, or rows. A last line that was cut short is left out: its writer was
killed. Anything else that is no row raises StoreError with its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from gradparity.errors import StoreError
from gradparity.reading import each_line
from gradparity.verdict import Row
from gradparity.writing import written


def write_lines(rows: Iterable[Row], path: Path) -> None:
    """One JSON object per row. Raises StoreFullError if the file cannot be written."""
    with written(path), path.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(line(row))


def line(row: Row) -> str:
    """The row as one line."""
    return json.dumps(row.to_json(), sort_keys=True) + "\n"


def read_lines(path: Path) -> list[Row]:
    """The rows of a file."""
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read {path}: {error}\n  try    a file that --json wrote") from error
    if texts[-1].startswith("{") and not _is_json(texts[-1]):  # its writer was killed in the middle of it
        del texts[-1]
    way_out = "the file as --json wrote it"
    return list(each_line(path, texts, lambda _, data: Row.from_json(data), "row of gradparity", way_out))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):
        pass  # whole, but for other eyes
    return True
