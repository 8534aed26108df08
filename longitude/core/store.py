"""Rows kept by content: what was computed, what came out, and when, in one sqlite file.

A key is any JSON object that says what was computed; the sha256 of its canonical form (fields
sorted, no spaces) is its address, so that asking again for the same content finds the same row,
whatever the order of the fields. Numbers that are equal are the same content: 1.0 is written as 1,
as the written form of a scheme does, and other programs may turn one into the other; True is not 1.
Tuples are lists. A value is any JSON object, kept as it is.

sqlite's own journal keeps the file whole when a process is killed, and its lock lets several write
at once. JSON lines carry rows to other machines and into a repository.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

VERSION = 1  # of the table below
OURS = int.from_bytes(b"Lngt")  # sqlite's application_id: whose file this is
PATIENCE = 60.0  # seconds to wait while others write
TABLE = """CREATE TABLE rows (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, value TEXT NOT NULL, made TEXT NOT NULL)"""
REPLACE = """INSERT INTO rows VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE
    SET value = excluded.value, made = excluded.made"""
# of two rows with one key the younger stays, so that files may be loaded in any order
MERGE = f"{REPLACE} WHERE (excluded.made, excluded.value) > (made, value)"


class StoreError(ValueError):
    """What can't be stored or read, told in one sentence: what, got what, do what."""


class Row(NamedTuple):
    """What was computed, what came out, and when (UTC, ISO 8601)."""

    key: dict[str, Any]
    value: dict[str, Any]
    made: str


class Store:
    """Rows in the sqlite file at `path`, made with its folder if need be; ":memory:" keeps none."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        try:
            if str(path) != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
        except (OSError, sqlite3.Error) as e:
            raise StoreError(f"{path} can't be opened as a store ({e}): name a file.") from e
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; every row is on disk already."""
        self._db.close()

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The value of this content, if it is recorded."""
        found = self._run("SELECT value FROM rows WHERE id = ?", address(key))
        return json.loads(found[0][0]) if found else None

    def put(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Record a value, in place of one recorded before; on disk when this returns."""
        self._run(REPLACE, address(key), _key_text(key), _value_text(value), _now())

    def rows(self, **match: Any) -> Iterator[Row]:
        """The rows whose keys have these fields, in an order that depends on content alone."""
        wanted = {name: _text(_plain(v, name, equal=True)) for name, v in match.items()}
        found = self._run("SELECT key, value, made FROM rows ORDER BY key")
        rows = (Row(json.loads(key), json.loads(value), made) for key, value, made in found)
        return (
            r for r in rows if wanted.items() <= {k: _text(v) for k, v in r.key.items()}.items()
        )

    def export(self, path: str | Path) -> int:
        """Write every row as a line of JSON; how many. The file is whole or it is the old one."""
        target, lines = Path(path), [_text(row._asdict()) + "\n" for row in self.rows()]
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_text("".join(lines), encoding="utf-8")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return len(lines)

    def load(self, path: str | Path) -> int:
        """Take in the rows of an exported file, all or none; how many it holds.

        Loading it twice changes nothing; where a key is recorded already, the younger row stays.
        """
        lines = [_row(line, f"{path}, line {n},") for n, line in _numbered(Path(path))]
        with self._writing():
            for row in lines:
                fields = address(row.key), _key_text(row.key), _value_text(row.value), row.made
                self._run(MERGE, *fields)
        return len(lines)

    def _prepare(self) -> None:
        """Make the table in a new file; refuse what is no store, or a later one."""
        if self._pragma("application_id") != OURS:
            with self._writing():  # another process may be making it at this moment
                if self._pragma("application_id") != OURS:
                    self._create()
        if (version := self._pragma("user_version")) > VERSION:
            raise StoreError(
                f"The store {self.path} is of version {version}, but this longitude reads up to "
                f"{VERSION}: install a newer longitude, or name another file."
            )

    def _create(self) -> None:
        if self._run("SELECT 1 FROM sqlite_master"):
            raise StoreError(
                f"{self.path} is a database of another program's: name another file as the store."
            )
        self._run(TABLE)
        self._run(f"PRAGMA application_id = {OURS}")
        self._run(f"PRAGMA user_version = {VERSION}")

    def _pragma(self, name: str) -> int:
        return self._run(f"PRAGMA {name}")[0][0]

    def _run(self, statement: str, *values: str) -> list[Any]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as e:
            raise StoreError(
                f"The store {self.path} can't be used ({e}): see that it is a store, that you may "
                "write it, and that no other process holds it."
            ) from e

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """All that is done inside, or nothing of it."""
        self._run("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._run("ROLLBACK")
            raise
        self._run("COMMIT")


def address(key: Mapping[str, Any]) -> str:
    """The sha256 of a key's canonical form, in hexadecimal."""
    return hashlib.sha256(_key_text(key).encode()).hexdigest()


def _key_text(key: Mapping[str, Any]) -> str:
    return _text(_plain(key, "key", equal=True))


def _value_text(value: Mapping[str, Any]) -> str:
    return _text(_plain(value, "value"))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _plain(value: Any, where: str, equal: bool = False) -> Any:
    """The value in JSON's own types; with `equal`, whole numbers in one form. Else a sentence."""
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: _plain(v, f"{where}.{k}", equal) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}[{n}]", equal) for n, v in enumerate(value)]
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if equal and value.is_integer() else float(value)
    if value is None or isinstance(value, str | int):
        return value
    raise StoreError(
        f"{where} can't be recorded, because it is {value!r:.60}: rows hold finite numbers, text, "
        "True, False, None, lists, and objects whose fields have names."
    )


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that aren't empty, from 1."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise StoreError(f"{path} can't be read as rows ({e}): name a file of JSON lines.") from e
    return ((n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip())


def _row(line: str, where: str) -> Row:
    """A line of an exported file."""
    try:
        row = Row(**json.loads(line))
        made = datetime.fromisoformat(row.made)
        if made.tzinfo and isinstance(row.key, dict) and isinstance(row.value, dict):
            return row._replace(made=_stamp(made))
    except (ValueError, TypeError, RecursionError, OverflowError):
        pass
    raise StoreError(
        f'{where} is no row: each line has the form {{"key": {{…}}, "value": {{…}}, '
        '"made": "2026-01-31T12:00:00+00:00"}.'
    )


def _now() -> str:
    return _stamp(datetime.now(UTC))


def _stamp(time: datetime) -> str:
    """A time whose text sorts as the time does."""
    return time.astimezone(UTC).isoformat(timespec="microseconds")
