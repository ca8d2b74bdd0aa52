"""Zero-bubble pipelines of two ranks: each half of a compiled backward computes its own products, once."""

from __future__ import annotations

import pytest

from distributed.group import spawned
from distributed.pipelines import SCHEDULES, compare

pytestmark = pytest.mark.programs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_zero_bubble_pipeline_computes_each_product_once(schedule: str) -> None:
    spawned(compare, 2, schedule)
