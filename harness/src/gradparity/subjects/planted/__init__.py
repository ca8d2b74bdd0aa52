"""Planted faults: eager with one thing wrong, which the harness must find.

In: a fault's name. Out: a subject that is accountable and promises bitwise equality, and breaks its word.
`outcomes.py` changes what was observed; `calls.py` and `stale.py` compile wrongly, `saved.py` what autograd
saves and what Functions say; `backwards.py` and `hooks.py` run the backward wrongly.
"""

from __future__ import annotations

from gradparity.subjects.base import Subject
from gradparity.subjects.planted import backwards, calls, hooks, outcomes, saved, stale
from gradparity.subjects.planted.fault import Fault
from gradparity.subjects.planted.outcomes import Wrong

FAULTS: dict[str, Fault] = {
    fault.name: fault for table in (outcomes, calls, saved, stale, backwards, hooks) for fault in table.FAULTS
}
"""By name."""

__all__ = ["FAULTS", "Fault", "Wrong", "planted"]


def planted(name: str, fault: str) -> Subject:
    """The subject with this fault."""
    return FAULTS[fault].make(name)
