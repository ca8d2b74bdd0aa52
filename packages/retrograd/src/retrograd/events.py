"""Counters and loggers: what happened, for people and for tests.

In: increments and texts from the stages. Out: `counters`, and the loggers below ``retrograd.live`` and
``retrograd.aot``. There are three ways to switch a logger on: ``TORCH_LOGS="+retrograd.live"``, as for any
importable module; ``logging`` itself; and ``RETROGRAD_LOGS=graph,schedule,guards,recompiles``, which writes
the named logs to standard error. ``RETROGRAD_LOGS=progress`` does so for ``retrograd.progress``.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter

from retrograd.process import forgotten_by_reset

#: Totals of this process: ``captures`` (backward graphs recorded), ``plans`` (schedules made),
#: ``lowerings`` (segments given to a backend), ``recompiles`` (lowerings of a segment that already had one),
#: ``run_failures`` (runs of compiled code that raised), ``fallbacks`` (backwards run on the stock engine),
#: ``opaque_calls`` (steps run as in eager), ``runs`` (plans run), ``cuda_graph_recordings``,
#: ``cuda_graph_replays`` and ``cuda_graph_plain_calls`` (calls of recordable code without a recording),
#: ``compiled_elsewhere`` (graphs that another process compiled first),
#: ``whole_graphs`` (whole-graph code that replaced code of repeated parts),
#: ``kept_partition_hits``, ``kept_partition_misses`` and ``kept_partition_refusals`` (partitions on disk).
counters: Counter[str] = Counter()
forgotten_by_reset(counters.clear)

#: The names of logs of captures. ``graph``: each captured backward in eager's order, and each
#: joint graph; ``schedule``: the steps of a backward, including hooks; ``guards``: what each piece of code
#: relies on; ``recompiles``: why a segment or function is recompiled or interpreted, with the two values that
#: differ, and why something ran eagerly; ``cache``: why a partition is not cached on disk.
NAMES = ("graph", "schedule", "guards", "recompiles", "cache")

live_log = logging.getLogger("retrograd.live")
LOGS = {name: live_log.getChild(name) for name in NAMES}

#: Says how far a long capture or compilation is; see `progress`.
progress_log = logging.getLogger("retrograd.progress")
_PROGRESS = "progress"

#: All names that ``RETROGRAD_LOGS`` may contain.
LOG_NAMES = (*NAMES, _PROGRESS)

#: The same loggers for graphs that are captured ahead of time, by ``retrograd.aot`` and behind Dynamo.
AOT_LOGS = {name: logging.getLogger("retrograd.aot").getChild(name) for name in NAMES}


def switch_logs(names: str) -> None:
    """Write the logs in `names`, separated by commas, to standard error.

    An unknown name gives a warning, not an error: a misspelt setting must not end a training run.
    """
    wanted = [name.strip().lstrip("+") for name in names.split(",") if name.strip()]
    if unknown := sorted(set(wanted) - set(LOG_NAMES)):
        warnings.warn(
            f"RETROGRAD_LOGS: unknown {', '.join(unknown)}\n  known  {', '.join(LOG_NAMES)}", stacklevel=2
        )
    chosen = [logs[name] for logs in (LOGS, AOT_LOGS) for name in NAMES if name in wanted]
    for log in [*chosen, *([progress_log] if _PROGRESS in wanted else [])]:
        log.setLevel(logging.DEBUG)
        log.propagate = False
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
            log.addHandler(handler)


switch_logs(os.environ.get("RETROGRAD_LOGS", ""))
