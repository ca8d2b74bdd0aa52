"""The tables of a store, and the checks before a file is taken for one.

In: a path. Out: an open connection to a store of this version. Raises StoreError with what was found, what
was expected and the way out.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from gradparity.errors import StoreError, StoreFullError

FORMAT = "gradparity store"
VERSION = 1
BUSY = 30.0
"""Seconds to wait for another process that writes."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE runs (
    id TEXT PRIMARY KEY, campaign TEXT NOT NULL, plan TEXT NOT NULL, versions TEXT NOT NULL,
    started REAL NOT NULL, finished REAL
);
CREATE TABLE steps (
    run TEXT NOT NULL REFERENCES runs(id), unit TEXT NOT NULL, step INTEGER NOT NULL, row TEXT NOT NULL,
    PRIMARY KEY (run, unit, step)
);
CREATE TABLE units (
    run TEXT NOT NULL REFERENCES runs(id), unit TEXT NOT NULL, error TEXT NOT NULL, PRIMARY KEY (run, unit)
);
"""
"""`steps` holds one row per judged case; `units` the units of work that are finished."""


def opened(path: Path, create: bool = True) -> sqlite3.Connection:
    """A connection to the store in this file, which is made if it is not there and `create` says so."""
    if not create and not path.is_file():
        raise StoreError(f"no store at {path}\n  try    gradparity run … --store {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=BUSY)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot open the store {path}: {error}\n  try    another --store") from error
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def failure(error: sqlite3.Error, path: Path) -> StoreError:
    """What a failed access means for the user."""
    text = str(error)
    if "full" in text or "disk I/O" in text:
        return StoreFullError(
            f"cannot write to the store {path}: {text}\n"
            "  found  no space left\n  try    free some, and run the same command again: it goes on"
        )
    if "locked" in text or "busy" in text:
        return StoreError(
            f"the store {path} is in use by another process\n"
            "  try    a --store for each process, and gradparity merge afterwards"
        )
    return StoreError(
        f"the store {path} is damaged: {text}\n  try    move it away; sqlite3 {path} .recover may save rows"
    )


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    try:
        if not _tables(connection):
            _create(connection)
        tables = _tables(connection)
        found = dict(connection.execute("SELECT key, value FROM meta")) if "meta" in tables else {}
    except sqlite3.Error as error:
        raise failure(error, path) from error
    if found.get("format") != FORMAT:
        raise StoreError(
            f"{path} is a database, but no store of gradparity\n  found  tables {sorted(tables)[:6]}\n"
            "  try    another --store"
        )
    if found.get("version") != str(VERSION):
        raise StoreError(
            f"{path} was written by another version of gradparity\n  found  version {found.get('version')} "
            f"of the format\n  wanted version {VERSION}\n  try    that gradparity, or another --store"
        )


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}


def _create(connection: sqlite3.Connection) -> None:
    """Makes all tables in one transaction, so that nobody finds only some of them, also not after a kill.

    sqlite3 begins no transaction for CREATE TABLE by itself. Another process may have made the tables while
    this one waited for its turn.
    """
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if _tables(connection):
            return
        for statement in TABLES.split(";"):
            if statement.strip():
                connection.execute(statement)
        connection.executemany(
            "INSERT INTO meta VALUES (?, ?)", [("format", FORMAT), ("version", str(VERSION))]
        )
