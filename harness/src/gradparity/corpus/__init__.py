"""Where programs come from: hand-written scenarios, torch's own databases, small models.

In: a corpus name. Out: chunks (names) and, per chunk, programs. Nothing here imports the machinery that runs
and judges them: other compilers can use the programs by themselves, by these names.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Corpus": "gradparity.corpus.base",
    "Program": "gradparity.corpus.base",
    "Way": "gradparity.probe",
    "programs": "gradparity.corpus.alone",
    "run": "gradparity.corpus.alone",
}

__all__ = ["Corpus", "Program", "Way", "programs", "run"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'gradparity.corpus' has no attribute {name!r}")
