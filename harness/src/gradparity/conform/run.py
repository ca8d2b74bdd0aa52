"""run: the campaign of a conformance run: one case of each place, in the order of the levels, for so long.

In: a plan with one subject, minutes. Out: a finished `Campaign`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gradparity import campaign
from gradparity.campaign import Campaign, Corpora, Plan
from gradparity.conform.levels import Place, places
from gradparity.conform.outcome import REMARKS
from gradparity.executors.unit import Unit
from gradparity.expected import Known
from gradparity.store.store import Entry
from gradparity.work import Task

Listener = Callable[[Campaign, Entry | None], None]
MARGIN = 20.0
"""Seconds before the end at which no more is waited for: workers have to end."""


class Places(Corpora):
    """The source of a campaign over the places of all levels. It is over when the time is up."""

    def __init__(self, plan: Plan, campaign: Campaign, until: float, chosen: list[Place]) -> None:
        self._chosen, self._until = chosen, until
        super().__init__(plan, campaign)
        campaign.until = until

    def planned(self) -> list[Unit]:
        """One case of each place."""
        plan, (subject,) = self._plan, self._plan.subjects
        common: dict[str, Any] = {"limit": 1, "blame": plan.blame, "checks": plan.checks}
        made = (Task(subject, *place, plan.device, plan.seed, **common) for place in self._chosen)
        return [Unit(task.to_json(), plan.timeout) for task in made]

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._until


def conformed(plan: Plan, minutes: float, known: Known | None, listen: Listener) -> Campaign:
    """Runs all places, or the first ones, for at most so many minutes. Remarks fail nothing."""
    until = time.monotonic() + max(60 * minutes - MARGIN, 0)
    source = partial(Places, until=until, chosen=places())
    found = campaign.run(plan, known, listen, source=source)
    found.rows = [row.as_expected() if row.verdict in REMARKS else row for row in found.rows]
    return found


def minutes_for_all(found: Campaign) -> int | None:
    """About how many minutes all places need, at the pace of those that ran; None if none did."""
    if not found.rows:
        return None
    pace = (time.monotonic() - found.began) / len(found.rows)
    return math.ceil((pace * found.total + MARGIN) / 60)
