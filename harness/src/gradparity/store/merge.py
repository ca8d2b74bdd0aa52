"""merge: stores and files of rows into one store.

In: paths. Out: one store. The same step of the same run counts once; the shards of one campaign become one
run.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradparity.reading import written_by_us
from gradparity.store.lines import read_lines
from gradparity.store.store import SQLITE, CaseDone, Run, Store, header_of

_OURS = ("run of gradparity", "the store that gradparity run --store wrote")


def merge(sources: list[Path], target: Path) -> int:
    """Adds all sources to the store `target`, which may exist. Returns the number of rows in it."""
    with Store(target) as store:
        for path in sources:
            if is_store(path):
                with Store(path, create=False) as source, written_by_us(f"a run in {path}", *_OURS):
                    _add_store(source, store)
            else:
                _add_lines(path, store)
        return len(store.rows())


def is_store(path: Path) -> bool:
    """Whether the file is a store (or cannot be read, which opening it will say)."""
    try:
        with path.open("rb") as file:
            head = file.readline(1 << 10)
    except OSError:
        return True
    return head.startswith(SQLITE) or header_of(head) is not None


def _add_store(source: Store, store: Store) -> None:
    for run in source.runs():
        target = _target(run, store)
        for entry in source.entries(run.id):
            store.add(target.id, entry)
        ended, joined = target.plan.get("ended", []), target.plan.get("joined", {})
        if target.finished is None and joined and len(ended) == _total(run):
            store.finish(target.id)


def _add_lines(path: Path, store: Store) -> None:
    """The rows of a file as a run named for what stands in the file: added twice, it is there once."""
    rows = read_lines(path)
    name = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
    when = path.stat().st_mtime
    store.add_run(Run(name, f"lines-{name}", {"lines": path.name}, {}, when, when))
    for step, row in enumerate(rows):
        store.add(name, CaseDone("lines", step, row))


def _target(run: Run, store: Store) -> Run:
    """Where a run's rows go: a whole run keeps its id; a shard goes to the first run of its campaign that
    has it already, or lacks this shard.
    """
    shard = run.plan.get("shard")
    if not shard:
        known = {item.id: item for item in store.runs()}.get(run.id)
        if known is None or known.finished is None:  # the store may have it from before its end
            store.add_run(run)
        return run
    for item in store.runs():
        joined = item.plan.get("joined", {})
        same = (item.campaign, item.versions) == (run.campaign, run.versions)
        if joined and same and joined.get(shard, run.id) == run.id:
            return _planned(replace(item, plan=_with_shard(item.plan, shard, run)), store)
    plan = _with_shard({**run.plan, "shard": None, "joined": {}, "ended": []}, shard, run)
    return _planned(replace(run, id=f"{run.campaign[:8]}{run.id[:4]}", plan=plan, finished=None), store)


def _planned(run: Run, store: Store) -> Run:
    store.add_run(run)
    return run


def _with_shard(plan: dict[str, Any], shard: str, run: Run) -> dict[str, Any]:
    """The plan of a joined run that also has this shard. `joined`: the run of each shard; `ended`: those
    that are complete.
    """
    ended = {*plan["ended"], shard} if run.finished is not None else {*plan["ended"]}
    return {**plan, "joined": {**plan["joined"], shard: run.id}, "ended": sorted(ended)}


def _total(run: Run) -> int:
    return int(str(run.plan["shard"]).partition("/")[2])
