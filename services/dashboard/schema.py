"""The tables of telemetry.sqlite. One file a run, so that a stopped run opens the way a live one does."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from pathlib import Path

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
FILE_NAME = "telemetry.sqlite"

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE spans (
  id INTEGER PRIMARY KEY,
  trace_id TEXT NOT NULL, span_id TEXT NOT NULL, parent_id TEXT NOT NULL,
  service TEXT NOT NULL, member TEXT NOT NULL, name TEXT NOT NULL,
  start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL,
  error TEXT, group_id TEXT, step INTEGER, attributes TEXT NOT NULL, links TEXT
);
CREATE UNIQUE INDEX spans_identity ON spans (trace_id, span_id);
CREATE INDEX spans_group ON spans (group_id) WHERE group_id IS NOT NULL;
CREATE INDEX spans_name ON spans (name);
CREATE TABLE steps (
  kind TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL,
  revision INTEGER NOT NULL, time REAL NOT NULL, weight_version INTEGER NOT NULL,
  trace_id TEXT NOT NULL, value_json TEXT NOT NULL, group_json TEXT NOT NULL,
  PRIMARY KEY (kind, name, step)
) WITHOUT ROWID;
CREATE UNIQUE INDEX steps_revision ON steps (revision);
CREATE TABLE accounts (time REAL PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE fleet_samples (
  time REAL PRIMARY KEY, engines INTEGER NOT NULL, busy REAL NOT NULL,
  running INTEGER NOT NULL, waiting INTEGER NOT NULL, tokens_per_second REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE snapshots (name TEXT PRIMARY KEY, time REAL NOT NULL, body TEXT NOT NULL) WITHOUT ROWID;
"""


class ForeignSchema(RuntimeError):
    """The file was written by a later version of Paceline."""


def open_writer(path: Path, run_id: str) -> sqlite3.Connection:
    """Open the file for writing, in WAL mode; make it when it is not there.

    A file that is not a database is moved aside: what it held came from others, and the steps come again.
    ForeignSchema when a later version of Paceline wrote it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        connection = _connect(path)
        version = _version(connection)
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.broken-{int(time.time())}")
        log.warning("%s cannot be read (%s); moved to %s and started afresh", path, error, aside.name)
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        connection = _connect(path)
        version = None
    if version is None:
        with connection:
            connection.executescript("BEGIN;" + _TABLES + "COMMIT;")
            rows = [("schema_version", str(SCHEMA_VERSION)), ("run_id", run_id), ("created", str(time.time()))]
            connection.executemany("INSERT INTO meta VALUES (?, ?)", rows)
    elif version != SCHEMA_VERSION:
        connection.close()
        raise ForeignSchema(
            f"{path} has schema version {version}, this dashboard writes {SCHEMA_VERSION}; "
            "use the Paceline that wrote it, or move the file away"
        )
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """Open the file for reading, whether or not a writer has it open. FileNotFoundError when there is none."""
    if not path.exists():
        raise FileNotFoundError(f"no telemetry at {path}: did the run's dashboard ever start?")
    # A reader needs the write-ahead log's index beside the file, which a folder without write permission cannot take.
    frozen = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    options = "mode=ro&immutable=1" if frozen else "mode=ro"
    connection = sqlite3.connect(f"file:{path}?{options}", uri=True, timeout=5, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA query_only = 1")
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10, check_same_thread=False)
    # NORMAL loses nothing when a process is killed, only when the machine is.
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "temp_store = MEMORY", "cache_size = -8000"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _version(connection: sqlite3.Connection) -> int | None:
    """The schema version in the file; None when it has no tables yet."""
    found = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]
    if not found:
        return None
    row = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    return int(row[0]) if row else None
