"""Tables of scores: seeds are put together, but never two schemes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longitude.eval.records import Score
from longitude.eval.stats import Interval
from longitude.viz.lab import LabTable, lab_tables

ROPE = Score("rope()", "rope", 0, "text", 256, 512, 2.0, curve=((0, 1, 5.0), (1, 512, 2.5)))


def table(*scores: Score) -> LabTable:
    (one,) = lab_tables(scores)
    return one


def test_seeds_are_put_together() -> None:
    scores = [replace(ROPE, seed=n, value=v) for n, v in enumerate((2.0, 1.0, 4.5))]
    scores += [replace(ROPE, length=1024, value=3.0), replace(ROPE, task="copy", value=1.0)]
    text, copy = lab_tables(scores)
    assert text.cells == {
        ("rope", 512): Interval(2.5, 1.0, 4.5, 3),
        ("rope", 1024): Interval(3.0, 3.0, 3.0, 1),
    }
    assert copy.cells == {("rope", 512): Interval(1.0, 1.0, 1.0, 1)}


def test_a_refusal_stands_where_no_seed_has_a_value() -> None:
    refused = replace(ROPE, value=None, refused="Too long.", curve=())
    place, silent = ("rope", 512), replace(refused, refused=None)
    some = table(refused, replace(ROPE, seed=1))
    assert some.cells == {place: Interval(2.0, 2.0, 2.0, 1)} and not some.refused
    none = table(replace(silent, seed=3), refused)
    assert none.cells == {place: None} and none.refused == {place: "Too long."}
    assert table(silent).cells == {place: None} and not table(silent).refused


def test_the_last_of_two_scores_for_the_same_counts() -> None:
    assert table(ROPE, replace(ROPE, value=1.0)).cells == {("rope", 512): Interval(1, 1, 1, 1)}


def test_two_schemes_under_one_label_go_by_their_written_forms() -> None:
    other = replace(ROPE, scheme="rope(base=500)", value=1.0)
    one = table(ROPE, other, replace(ROPE, label="r2"))
    means = {label: value.mean for (label, _), value in one.cells.items() if value}
    assert means == {"rope()": 2.0, "rope(base=500)": 1.0, "r2": 2.0}
    assert one.labels == (*one.curves,) == (*means,)


def test_two_trained_windows_are_kept_apart() -> None:
    near, far = lab_tables([ROPE, replace(ROPE, trained=512, value=1.0)])
    assert (near.trained, far.trained) == (256, 512)
    assert near.cells == {("rope", 512): Interval(2.0, 2.0, 2.0, 1)}
    assert far.cells == {("rope", 512): Interval(1.0, 1.0, 1.0, 1)}


def test_each_label_shows_the_curve_of_its_own_longest_text() -> None:
    long = replace(ROPE, length=1024, curve=((4, 1024, 1.0), (0, 4, 3.0)))
    seed = replace(long, seed=1, curve=((0, 4, 5.0), (4, 1024, 1.0)))
    learned = replace(ROPE, scheme="learned(512)", label="learned")
    refused = replace(learned, length=1024, value=None, refused="Too long.", curve=())
    text, task = lab_tables(
        [ROPE, long, seed, learned, refused, replace(long, task="copy", length=9999)]
    )
    # a point in the middle of each bin on a log axis, and one at the end
    end = Interval(1.0, 1.0, 1.0, 2)
    assert text.by_position and text.curves["rope"] == [
        (2.0, Interval(4.0, 3.0, 5.0, 2)), (pytest.approx(71.554, abs=1e-3), end), (1024.0, end),
    ]  # fmt: skip
    assert [value.mean for _, value in text.curves["learned"]] == [5.0, 2.5, 2.5]
    assert not task.by_position and task.curves == {"rope": [(9999.0, Interval(2, 2, 2, 1))]}
    assert not table(refused).curves and lab_tables([]) == []


def test_a_bin_of_one_position_is_a_point() -> None:
    one = table(replace(ROPE, curve=((0, 1, 5.0),)))
    assert one.curves == {"rope": [(1.0, Interval(5.0, 5.0, 5.0, 1))]}
