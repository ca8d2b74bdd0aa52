"""signature: what two finds must share to count as one.

In: a row, with the stage and the operator that an ablation names. Out: twelve hex digits. Numbers, hashes,
addresses and the name of the case do not count.
"""

from __future__ import annotations

import hashlib
import re

from gradparity.verdict import Row

PARTICULARS = re.compile(r"0x[0-9a-f]+|#?\b[0-9a-f]{12}\b|[-+]?\d[\d.,e+-]*|'[^']*'|\"[^\"]*\"")
"""What differs from case to case in the words of one and the same failure."""


def signature(row: Row) -> str:
    """The digest of subject, verdict, symptom, stage, operator, and of an exception the bare words."""
    parts = (row.subject, row.verdict.value, _bare(row.symptom), row.stage, row.operator, _words(row))
    return hashlib.blake2b("\x00".join(parts).encode(), digest_size=6).hexdigest()


def _words(row: Row) -> str:
    return _bare(row.reason) if row.symptom.startswith("raises") else ""


def _bare(text: str) -> str:
    return " ".join(PARTICULARS.sub("_", text).split())[:200]
