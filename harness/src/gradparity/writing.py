"""writing: the files that a user asked for, or a sentence that says why one could not be written.

In: a path. Out: its folders, and one error of the harness for whatever the system refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradparity.errors import StoreFullError


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Inside, the file is written, in a folder that is there. What the system refuses becomes a
    StoreFullError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StoreFullError(f"cannot write {path}: {error}\n  try    another path") from error


def write_text(path: Path, text: str) -> Path:
    """Writes a file, and says where. Raises StoreFullError."""
    with written(path):
        path.write_text(text, encoding="utf-8")
    return path
