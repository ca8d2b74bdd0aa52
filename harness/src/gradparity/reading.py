"""reading: values of ours out of what a file holds, or a sentence that says what is wrong there.

In: plain data of a file that anybody may have written. Out: a frozen value whose fields have their types; or
one error of the harness with the file, the line and the way out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from gradparity.errors import StoreError

T = TypeVar("T")

DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""What data of another form raise where they are used."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_as(kind: type[T], data: Any) -> T:
    """`data` as a value of this class; unknown keys are ignored. Raises ValueError for anything else."""
    key: Any = kind
    try:
        made: T = _adapter(key).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else str(first["msg"])) from error
    return made


@contextmanager
def written_by_us(place: str, what: str, way_out: str) -> Iterator[None]:
    """Inside, data of a file are used: what those of another form raise becomes a StoreError."""
    try:
        yield
    except DAMAGED as error:
        raise StoreError(
            f"{place} is no {what}: {type(error).__name__}: {error}\n  try    {way_out}"
        ) from error


def each_line(
    path: Path, texts: Sequence[str], take: Callable[[int, Any], T], what: str, way_out: str
) -> Iterator[T]:
    """What `take` makes of the number and the JSON of each line that is not empty."""
    for number, text in enumerate(texts, 1):
        if text.strip():
            with written_by_us(f"{path}:{number}", what, way_out):
                made = take(number, json.loads(text))
            yield made
