"""gradparity: runs one program under eager PyTorch and under a compiler, and compares everything the backward
shows.

In: programs written through `Probe`. Out: verdicts. Names are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "Case": "gradparity.case",
    "Outcome": "gradparity.outcome",
    "Probe": "gradparity.probe",
    "Row": "gradparity.verdict",
    "Subject": "gradparity.subjects.base",
    "Verdict": "gradparity.verdict",
    "assert_parity": "gradparity.parity",
    "check": "gradparity.parity",
    "compare": "gradparity.differential",
    "scenario": "gradparity.corpus.scenario",
}

__all__ = [
    "Case",
    "Outcome",
    "Probe",
    "Row",
    "Subject",
    "Verdict",
    "__version__",
    "assert_parity",
    "check",
    "compare",
    "scenario",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'gradparity' has no attribute {name!r}")
