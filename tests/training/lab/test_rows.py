"""Scores: seeds are put together, but never two schemes."""

from __future__ import annotations

from dataclasses import replace

from longitude.training.lab.rows import Bin, Cell, Score, Spread, curves, summary

ROPE = Score("rope()", "rope", 0, "text", 256, 512, 2.0, curve=((0, 1, 5.0), (1, 512, 2.5)))


def test_seeds_are_put_together() -> None:
    scores = [replace(ROPE, seed=n, value=v) for n, v in enumerate((2.0, 1.0, 4.5))]
    scores += [replace(ROPE, length=1024, value=3.0), replace(ROPE, task="copy", value=1.0)]
    assert summary(scores) == (
        Cell("text", 256, "rope", 512, Spread(2.5, 1.0, 4.5, 3), None),
        Cell("text", 256, "rope", 1024, Spread(3.0, 3.0, 3.0, 1), None),
        Cell("copy", 256, "rope", 512, Spread(1.0, 1.0, 1.0, 1), None),
    )


def test_a_refusal_stands_where_no_seed_has_a_value() -> None:
    refused = replace(ROPE, value=None, refused="Too long.", curve=())
    other = replace(ROPE, seed=1)
    assert summary([refused, other])[0][-2:] == (Spread(2.0, 2.0, 2.0, 1), None)
    assert summary([replace(refused, refused=None, seed=3), refused])[0][-2:] == (None, "Too long.")
    assert summary([replace(refused, refused=None)])[0][-2:] == (None, None)


def test_the_last_of_two_scores_for_the_same_counts() -> None:
    assert summary([ROPE, replace(ROPE, value=1.0)])[0].spread == Spread(1.0, 1.0, 1.0, 1)


def test_two_schemes_under_one_label_go_by_their_written_forms() -> None:
    scores = [ROPE, replace(ROPE, scheme="rope(base=500)", value=1.0), replace(ROPE, label="r2")]
    assert [(c.label, c.spread and c.spread.mean) for c in summary(scores)] == [
        ("rope()", 2.0),
        ("rope(base=500)", 1.0),
        ("r2", 2.0),
    ]
    assert {b.label for b in curves(scores)} == {"rope()", "rope(base=500)", "r2"}


def test_two_trained_windows_are_kept_apart() -> None:
    cells = summary([ROPE, replace(ROPE, trained=512, value=1.0)])
    assert [(c.trained, c.spread and c.spread.mean) for c in cells] == [(256, 2.0), (512, 1.0)]


def test_each_label_shows_the_curve_of_its_own_longest_text() -> None:
    long = replace(ROPE, length=1024, curve=((0, 4, 3.0), (4, 1024, 1.0)))
    seed = replace(long, seed=1, curve=((0, 4, 5.0), (4, 1024, 1.0)))
    learned = replace(ROPE, scheme="learned(512)", label="learned")
    refused = replace(learned, length=1024, value=None, refused="Too long.", curve=())
    task = replace(long, task="copy", length=9999)
    assert curves([ROPE, long, seed, learned, refused, task]) == (
        Bin(256, "rope", 1024, 0, 4, Spread(4.0, 3.0, 5.0, 2)),
        Bin(256, "rope", 1024, 4, 1024, Spread(1.0, 1.0, 1.0, 2)),
        Bin(256, "learned", 512, 0, 1, Spread(5.0, 5.0, 5.0, 1)),
        Bin(256, "learned", 512, 1, 512, Spread(2.5, 2.5, 2.5, 1)),
    )
    assert curves([refused, task]) == () and summary([]) == ()
