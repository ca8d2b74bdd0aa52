"""Counters and loggers: what happened, for people and for tests.

In: increments from the stages. Out: `counters` and the loggers below ``retrograd`` (switched by
``TORCH_LOGS="+retrograd.live"`` like those of any importable module, or by ``logging`` itself).
"""

from __future__ import annotations

import logging
from collections import Counter

__all__ = ["counters", "live_log"]

#: Totals of this process: ``captures`` (backward graphs recorded), ``plans`` (schedules laid out),
#: ``lowerings`` (segments given to a backend), ``recompiles`` (lowerings of a segment that had one),
#: ``fallbacks`` (backwards run on the stock engine), ``opaque_calls`` (steps run as eager runs them),
#: ``runs`` (plans run).
counters: Counter[str] = Counter()

live_log = logging.getLogger("retrograd.live")
