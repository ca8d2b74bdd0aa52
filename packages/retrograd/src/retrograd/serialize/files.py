"""Pack pieces of bytes into one file that detects changes since it was written.

In: a heading of plain data, and the pieces. Out: bytes: the heading as one line, with the sizes and a hash of
the pieces, then the pieces. The hash is not a signature: anyone who writes a file can compute it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def packed(heading: Mapping[str, Any], pieces: Sequence[bytes]) -> bytes:
    """`heading`, then `pieces`. The heading must not contain ``sizes`` and ``sha256``."""
    body = b"".join(pieces)
    first = {**heading, "sizes": [*map(len, pieces)], "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(first).encode() + b"\n" + body


def heading_of(data: bytes) -> dict[str, Any]:
    """The heading of bytes that `packed` made.

    Raises:
        ValueError: there is none.
    """
    found = json.loads(data.partition(b"\n")[0])
    if not isinstance(found, dict):
        raise ValueError("it has no heading")
    return found


def unpacked(data: bytes) -> list[bytes]:
    """The pieces in bytes that `packed` made.

    Raises:
        ValueError, KeyError, TypeError: the bytes have changed since, or `packed` did not make them.
    """
    heading, body = heading_of(data), data.partition(b"\n")[2]
    if hashlib.sha256(body).hexdigest() != heading["sha256"]:
        raise ValueError("its contents have changed since it was written")
    pieces: list[bytes] = []
    start = 0
    for size in heading["sizes"]:
        pieces.append(body[start : start + size])
        start += size
    return pieces
