"""Files that are complete or absent, and a content-addressed store of results in one sqlite file.

A file or a checkpoint folder is written under a hidden name beside its destination and moved there
at the end: a kill, an error or a full disk leaves the old version, or none. Leftovers of a killed
write are removed by the next one.

A key of the store is any JSON object that describes a computation; its address is the sha256 of its
canonical form (fields sorted, no spaces), so equal keys find the same row whatever the order of
their fields. Equal numbers are equal keys: 1.0 is written as 1, as in the text form of a scheme;
True is not 1. Tuples are lists. A value is any JSON object, stored unchanged. sqlite's journal
keeps the file consistent if a process is killed, and its lock lets several processes write. JSON
lines carry rows to other machines and into a repository.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from longitude.core.validate import UserError, shown

CONFIG, ADAPTER = "config.json", "adapter_config.json"
STALE = (CONFIG, ADAPTER, "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
LEFTOVERS = ".*.part"  # of writes that were killed
VERSION = 1  # of the table below
APPLICATION_ID = int.from_bytes(b"Lngt")  # of the sqlite file
BYTE_ORDER_MARKS = (  # UTF-32-LE's mark begins with UTF-16-LE's, so it comes first
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
BUSY_TIMEOUT = 60.0  # seconds to wait while others write
TABLE = """CREATE TABLE rows (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, value TEXT NOT NULL, made TEXT NOT NULL)"""
REPLACE = """INSERT INTO rows VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE
    SET value = excluded.value, made = excluded.made"""
# of two rows with the same key the newer wins, so that files may be loaded in any order
MERGE = f"{REPLACE} WHERE (excluded.made, excluded.value) > (made, value)"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to, moved to `path` if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    for old in path.parent.glob(f".{escape(path.name)}.*.part"):
        with locked(old) as alone, suppress(OSError):
            if alone:  # its writer was killed
                old.unlink()
    try:
        part.touch()
        with locked(part):
            yield part
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a folder or file until the block or the process ends, even if it is killed: no lock gets
    stale. Yields whether this process alone holds it; True where the system has no locks."""
    alone = True
    with ExitStack() as stack:
        try:
            import fcntl  # Windows has none

            stack.callback(os.close, handle := os.open(path, os.O_RDONLY))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        except (ImportError, OSError):
            pass
        yield alone


@contextmanager
def atomic_checkpoint(folder: Path) -> Iterator[Path]:
    """A temporary folder for a model's files, moved to `folder` if the block ends without an error,
    config.json (or an adapter's) last: a folder that has it has everything."""
    folder = folder.resolve()
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        folder.mkdir(exist_ok=True)
        # an old config.json does not fit new weights; one old weight file would shadow new shards
        for file in (old for pattern in STALE for old in folder.glob(pattern)):
            file.unlink()
        for file in sorted(part.iterdir(), key=lambda file: file.name in (CONFIG, ADAPTER)):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; empty for an optional one that is not there."""
    if optional and not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{file} is no JSON ({why}): write it again, or name another.") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{file} should hold a JSON object, but holds {shown(content)}: correct it."
        )
    return content


def marked_encoding(data: bytes) -> str | None:
    """The encoding that a text's byte order mark names, None if it has none."""
    return next((name for mark, name in BYTE_ORDER_MARKS if data.startswith(mark)), None)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class StoreError(ValueError):
    """A row or file that can't be stored or read: what was wrong, what was given, what to do."""


class Row(NamedTuple):
    """The key of a computation, its value, and when it was stored (UTC, ISO 8601)."""

    key: dict[str, Any]
    value: dict[str, Any]
    made: str


class Store:
    """Rows in the sqlite file at `path`, created with its folder if need be; or ":memory:"."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        try:
            if str(path) != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)
        except (OSError, sqlite3.Error) as e:
            raise StoreError(f"{path} can't be opened as a store ({e}): name a file.") from e
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; every row is on disk already."""
        self._db.close()

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The value of this key, None if there is none."""
        rows = self._run("SELECT value FROM rows WHERE id = ?", address(key))
        return self._object(rows[0][0]) if rows else None

    def put(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Store a value, replacing an earlier one; on disk when this returns."""
        self._write(REPLACE, key, value, _stamp(datetime.now(UTC)))

    def rows(self, **match: Any) -> Iterator[Row]:
        """The rows whose keys have these fields, in an order that depends on content alone."""
        fields = {name: _text(_json(v, name, canonical=True)) for name, v in match.items()}
        stored = self._run("SELECT key, value, made FROM rows ORDER BY key")
        rows = (Row(self._object(key), self._object(value), made) for key, value, made in stored)
        return (
            r for r in rows if fields.items() <= {k: _text(v) for k, v in r.key.items()}.items()
        )

    def export(self, path: str | Path) -> int:
        """Write every row as a line of JSON, atomically; returns the number of rows."""
        lines = [_text(row._asdict()) + "\n" for row in self.rows()]
        with atomic_file(Path(path)) as part:
            part.write_text("".join(lines), encoding="utf-8")
        return len(lines)

    def load(self, path: str | Path) -> int:
        """Add the rows of an exported file, all or none; returns the number of rows in it. Loading
        a file twice changes nothing; if a key is stored already, the newer row wins."""
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as e:
            raise StoreError(
                f"{path} can't be read as rows ({e}): name a file of JSON lines."
            ) from e
        rows = [_row(line, f"{path}, line {n},") for n, line in enumerate(lines, 1) if line.strip()]
        with self._transaction():
            for row in rows:
                self._write(MERGE, *row)
        return len(rows)

    def _object(self, text: str) -> dict[str, Any]:
        """The key or value of a row."""
        try:
            return json.loads(text)
        except ValueError as e:
            raise StoreError(
                f"The store {self.path} has a damaged row ({e}): delete it, or name another file."
            ) from e

    def _write(
        self, statement: str, key: Mapping[str, Any], value: Mapping[str, Any], made: str
    ) -> None:
        self._run(statement, address(key), _key_text(key), _text(_json(value, "value")), made)

    def _prepare(self) -> None:
        """Create the table in a new file; refuse other databases and later versions."""
        if self._pragma("application_id") != APPLICATION_ID:
            with self._transaction():  # another process may be creating it right now
                if self._pragma("application_id") != APPLICATION_ID:
                    if self._run("SELECT 1 FROM sqlite_master"):
                        raise StoreError(
                            f"{self.path} is a database of another program's: name another file "
                            "as the store."
                        )
                    self._run(TABLE)
                    self._run(f"PRAGMA application_id = {APPLICATION_ID}")
                    self._run(f"PRAGMA user_version = {VERSION}")
        if (version := self._pragma("user_version")) > VERSION:
            raise StoreError(
                f"The store {self.path} is of version {version}, but this longitude reads up to "
                f"{VERSION}: install a newer longitude, or name another file."
            )

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
    def _transaction(self) -> Iterator[None]:
        """Everything inside is written, or nothing."""
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
    return _text(_json(key, "key", canonical=True))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _json(value: Any, where: str, canonical: bool = False) -> Any:
    """The value in JSON's types; `canonical` writes integral floats as integers."""
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: _json(v, f"{where}.{k}", canonical) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json(v, f"{where}[{n}]", canonical) for n, v in enumerate(value)]
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if canonical and value.is_integer() else float(value)
    if value is None or isinstance(value, str | int):
        return value
    raise StoreError(
        f"{where} can't be recorded, because it is {value!r:.60}: rows hold finite numbers, text, "
        "True, False, None, lists, and objects whose fields have names."
    )


def _row(line: str, where: str) -> Row:
    """The row of one line of an exported file."""
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


def _stamp(time: datetime) -> str:
    """Format a time as text that sorts in order of time."""
    return time.astimezone(UTC).isoformat(timespec="microseconds")
