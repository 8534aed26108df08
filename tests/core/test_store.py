"""Rows by content: one key whatever its spelling, no half file after a kill, sentences."""

from __future__ import annotations

import json
import math
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude.core.store import VERSION, Row, Store, StoreError, address, read_json
from longitude.core.validate import UserError

ROOT = Path(__file__).parent.parent.parent
KEY = {"scheme": "rope()", "seed": 0, "length": 512}
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
JSON = st.recursive(
    LEAVES.filter(lambda v: not isinstance(v, float) or math.isfinite(v)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=4)
WRITER = """
import sys
from longitude.core.store import Store
first = int(sys.argv[2])
for n in range(first, first + int(sys.argv[3])):
    with Store(sys.argv[1]) as store:  # opened anew, so that a kill may also hit the opening
        store.put({"n": n}, {"text": str(n % 10) * 50_000})
    print(n, flush=True)
"""


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as opened:
        yield opened


def test_what_is_put_is_got(store: Store) -> None:
    assert store.get(KEY) is None
    store.put(KEY, {"value": 0.1 + 0.2, "curve": ((0, 1, 5.5),), "refused": None, "whole": 1.0})
    got = store.get(KEY)
    assert got == {"value": 0.1 + 0.2, "curve": [[0, 1, 5.5]], "refused": None, "whole": 1.0}
    assert isinstance(got["whole"], float)  # values are kept as they are
    store.put(KEY, {"value": 2})
    assert store.get(KEY) == {"value": 2} and len([*store.rows()]) == 1


def test_the_order_of_fields_is_no_content(store: Store) -> None:
    store.put({"a": 1, "b": {"c": [1, 2], "d": None}}, {"found": True})
    assert store.get({"b": {"d": None, "c": (1, 2)}, "a": 1}) == {"found": True}
    assert store.get({"b": {"d": None, "c": (2, 1)}, "a": 1}) is None


def test_equal_numbers_are_one_key_and_truth_is_no_number() -> None:
    assert address({"lr": 1}) == address({"lr": 1.0}) and address({"x": 0}) == address({"x": -0.0})
    assert address({"x": 10**20}) == address({"x": 1e20})
    others = [True, "1", [1], None, 1.5]
    assert len({address({"lr": v}) for v in [1, *others]}) == 1 + len(others)


def test_the_address_is_the_sha256_of_the_canonical_form() -> None:
    # sha256 of {"a":[1,0.1],"b":"\u03b8"}, by coreutils
    digest = "d7273fb4d8221c6091db83016ce52703ff3facad8f28512ef1da7ec6e884dd3f"
    assert address({"b": "θ", "a": [1.0, 0.1]}) == digest


@settings(max_examples=40)
@given(OBJECTS, OBJECTS)
def test_any_object_comes_back(key: dict[str, Any], value: dict[str, Any]) -> None:
    with Store(":memory:") as store:
        store.put(key, value)
        assert store.get(dict(reversed(key.items()))) == value
        assert [(r.key, r.value) for r in store.rows()] == [(key, value)]


def test_rows_are_found_by_fields_of_their_keys(store: Store) -> None:
    for seed in (2, 0, 1):
        for task in ("text", "copy"):
            store.put({"seed": seed, "task": task}, {"value": seed})
    store.put({"task": "text", "extra": None}, {"value": 9})
    assert [r.value["value"] for r in store.rows(task="copy")] == [0, 1, 2]
    assert [r.key["task"] for r in store.rows(seed=1.0)] == ["copy", "text"]
    assert [r.value["value"] for r in store.rows(extra=None)] == [9]  # there, and None
    assert len([*store.rows()]) == 7 and not [*store.rows(seed=True)] and not [*store.rows(no=1)]


def test_rows_may_be_written_while_they_are_read(store: Store) -> None:
    store.put({"n": 0}, {})
    for row in store.rows():
        store.put({"n": row.key["n"] + 1}, {})
    assert len([*store.rows()]) == 2


def test_a_row_knows_when_it_was_made(store: Store) -> None:
    before = datetime.now(UTC)
    store.put(KEY, {})
    (row,) = store.rows()
    made = datetime.fromisoformat(row.made)
    assert before <= made <= datetime.now(UTC) and made.utcoffset() == timedelta(0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, b"x", {1: 2}, {3}, 1j])
def test_what_is_not_json_is_refused(store: Store, bad: Any) -> None:
    with pytest.raises(StoreError, match=r"^value\.deep\[1\] can't be recorded, because it is"):
        store.put(KEY, {"deep": [0, bad]})
    with pytest.raises(StoreError, match=r"^key\.x can't be recorded"):
        store.get({"x": bad})
    assert not [*store.rows()]


def test_rows_travel_as_json_lines(tmp_path: Path) -> None:
    lines, again = tmp_path / "new" / "rows.jsonl", tmp_path / "again.jsonl"
    with Store(tmp_path / "a.sqlite") as a, Store(tmp_path / "deep" / "b.sqlite") as b:
        for n in (3, 1, 2):
            a.put({"n": n, "scheme": "rope()\n{}"}, {"value": n / 3, "θ": "é\u2028"})
        assert a.export(lines) == 3
        assert b.load(lines) == 3 and [*b.rows()] == [*a.rows()]
        assert b.load(lines) == 3 and b.export(again) == 3
        assert again.read_bytes() == lines.read_bytes()
    parsed = [Row(**json.loads(line)) for line in lines.read_text().splitlines()]
    assert [row.key["n"] for row in parsed] == [1, 2, 3]
    assert sorted(p.name for p in lines.parent.iterdir()) == ["rows.jsonl"]


def test_an_export_that_fails_leaves_the_old_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "rows.jsonl"
    store.put(KEY, {"value": 1})
    store.export(target)
    old = target.read_bytes()
    store.put(KEY, {"value": 2})
    write = Path.write_text

    def full(self: Path, text: str, **options: Any) -> int:
        write(self, text[:5], **options)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        store.export(target)
    assert target.read_bytes() == old and [*tmp_path.iterdir()] == [target]


def line(value: int, made: str) -> str:
    return json.dumps({"key": KEY, "value": {"value": value}, "made": made})


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_of_two_rows_the_younger_stays(store: Store, tmp_path: Path, order: list[int]) -> None:
    rows = [
        line(1, "2026-01-01T10:00:00+00:00"),
        line(2, "2026-01-01T12:30:00+02:00"),  # half past ten, UTC
        line(3, "2026-01-01T10:29:59.999999+00:00"),
    ]
    for n in order:
        path = tmp_path / f"{n}.jsonl"
        path.write_text(rows[n] + "\n\n")
        store.load(path)
    assert store.get(KEY) == {"value": 2}
    assert next(store.rows()).made == "2026-01-01T10:30:00.000000+00:00"


GOOD = line(1, "2026-01-01T10:00:00+00:00")
BAD = [
    "no json",
    "[1]",
    "{}",
    GOOD[:-1],
    line(1, "yesterday"),
    line(1, "2026-01-01T10:00:00"),  # in which time zone?
    GOOD.replace('"value": 1', '"value": NaN'),
    GOOD.replace('{"value": 1}', "1"),
    "[" * 100_000,
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_file_with_a_bad_line_is_not_loaded(store: Store, tmp_path: Path, bad: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n{bad}\n")
    with pytest.raises(StoreError, match=r"line 2, is no row|value\.value can't be recorded") as e:
        store.load(path)
    assert "\n" not in str(e.value) and not [*store.rows()]


def test_a_file_that_is_no_text_is_not_loaded(store: Store, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "binary", tmp_path / "missing", tmp_path):
        with pytest.raises(StoreError, match=f"^{re.escape(str(path))} can't be read as rows"):
            store.load(path)


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("A text that somebody wants to keep. " * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(other)
    with pytest.raises(StoreError, match="can't be opened as a store"):
        Store(tmp_path)
    with pytest.raises(StoreError, match="can't be opened as a store"):
        Store(other / "under" / "a" / "file.sqlite")
    assert other.read_text().startswith("A text")


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mail.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE mail (body)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="a database of another program's"):
        Store(path)
    assert path.read_bytes() == before


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    Store(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(StoreError, match=rf"is of version {VERSION + 1}, but .* up to {VERSION}:"):
        Store(path)


def writer(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(count)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_damaged_row_is_told(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.put(KEY, {"loss": 1.25})
        with closing(sqlite3.connect(tmp_path / "s.sqlite")) as db, db:
            db.execute("UPDATE rows SET value = substr(value, 1, 9)")
        with pytest.raises(StoreError, match=r"s\.sqlite has a damaged row .*: delete it"):
            store.get(KEY)
        with pytest.raises(StoreError, match="damaged row"):
            list(store.rows())


def test_a_kill_leaves_every_row_that_was_written(tmp_path: Path) -> None:
    path, told = tmp_path / "rows.sqlite", 0
    for stop in (1, 7, 16):  # on its way, at different moments of a write
        process = writer(path, told, 10_000)
        assert process.stdout
        with process.stdout as lines:
            for _ in range(stop):
                told = int(next(lines)) + 1
            process.send_signal(signal.SIGKILL)
            told += len([*lines])  # said before the signal came
        assert process.wait() == -signal.SIGKILL
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        with Store(path) as store:
            kept = {row.key["n"]: row.value["text"] for row in store.rows()}
        assert kept.keys() - {told} == {*range(told)}  # the last may be in, but not be told
        assert all(text == str(n % 10) * 50_000 for n, text in kept.items())


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"  # which they also make at once
    processes = [writer(path, first, 10) for first in (0, 10, 20)]
    with ThreadPoolExecutor() as pool:
        said = [out for out, _ in pool.map(lambda p: p.communicate(), processes)]
    assert [p.returncode for p in processes] == [0, 0, 0] and "".join(said).count("\n") == 30
    with Store(path) as store:
        assert {row.key["n"] for row in store.rows()} == {*range(30)}


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    with Store(tmp_path / "rows.sqlite") as store:
        store.put(KEY, {})
    with pytest.raises(StoreError, match="closed"):
        store.get(KEY)


def test_a_file_that_is_too_deep_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (file := tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is no JSON"):
        read_json(file)
