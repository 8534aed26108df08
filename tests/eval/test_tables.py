"""Boards, curves, families and taxes, each against a computation by hand on made-up rows."""

import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from longitude.eval.records import ANSWER_LOSS, BASELINE, LOSS
from longitude.eval.stats import Interval
from longitude.eval.tables import (
    by_family,
    curves,
    in_window_cost,
    insane,
    labels,
    relative_speed,
    result_tables,
)
from tests.measured import OWN, answered, context, cost, document, kept, reading, row


def about(interval: Interval | None, values: list[float]) -> None:
    """Assert that it is the t interval of these (fewer than eight) numbers."""
    assert interval is not None
    n, mean = len(values), sum(values) / len(values)
    t = {3: 4.302653, 4: 3.182446}[n]
    half = t * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    found = (interval.mean, interval.low, interval.high, interval.n)
    assert found == pytest.approx((mean, mean - half, mean + half, n))


def test_a_board_has_means_over_documents_and_paired_differences() -> None:
    own, other = [3.0, 4.0, 5.0, 6.0], [2.8, 3.9, 4.7, 5.8]
    board = result_tables([*context("b", 512, other), *context(OWN, 512, own)])["context"]
    assert board.labels == (BASELINE, "b")  # the untouched first
    assert (board.lengths, board.trained, board.metric.lower_is_better) == ((512,), 256, True)
    cell, untouched = board.cells["b", 512], board.cells[BASELINE, 512]
    about(cell.value, other)
    about(cell.over, [a - b for a, b in zip(other, own, strict=True)])
    assert untouched.over is None
    assert (cell.best, cell.tied) == (True, False)
    assert (untouched.best, untouched.tied) == (False, False)  # though their intervals overlap


def test_only_what_both_were_measured_on_is_compared() -> None:
    rows = [*context(OWN, 512, [3.0, 4.0, 5.0]), *context("b", 512, [2.0, 3.5, 4.0, 99.0])]
    cell = result_tables(rows)["context"].cells["b", 512]
    about(cell.value, [2.0, 3.5, 4.0, 99.0])
    about(cell.over, [-1.0, -0.5, -1.0])
    assert cell.best  # of the three that both have, whatever its fourth is


def test_documents_are_paired_whatever_the_order_of_rows() -> None:
    rng = random.Random(0)
    own = [rng.gauss(3, 1) for _ in range(12)]
    rows = [*context(OWN, 512, own), *context("b", 512, [v + 0.01 for v in own])]
    rng.shuffle(rows)
    cell = result_tables(rows)["context"].cells["b", 512]
    assert cell.over is not None and cell.over.clear
    assert cell.over.mean == pytest.approx(0.01)
    assert not cell.tied


def test_one_document_ties_everything() -> None:
    cells = result_tables([*context(OWN, 512, [9.0]), *context("b", 512, [1.0])])["context"].cells
    assert cells["b", 512].best and cells[BASELINE, 512].tied


def test_a_loss_comes_from_the_shortest_reading_that_has_it() -> None:
    whole = reading("b", 1024, [{256: 1.0, 512: 2.0, 1024: 3.0}] * 2)
    by_length = [  # whose longer reading would say otherwise of its first tokens
        *reading(OWN, 1024, [{256: 9.0, 1024: 3.5}] * 2),
        *reading(OWN, 256, [{256: 1.5}] * 2),
    ]
    for rows in ([*whole, *by_length], [*by_length, *whole][::-1]):
        board = result_tables(rows)["loss"]
        means = {place: cell.value and cell.value.mean for place, cell in board.cells.items()}
        assert [means["b", n] for n in (256, 512, 1024)] == [1.0, 2.0, 3.0]
        assert [means[BASELINE, n] for n in (256, 512, 1024)] == [1.5, None, 3.5]
        over = board.cells["b", 256].over
        assert over is not None and over.mean == -0.5


def test_what_was_refused_says_why_and_a_shorter_reading_counts() -> None:
    why = {"refused": "out of memory at 1024 tokens."}
    rows = [
        *reading(OWN, 1024, [{256: 1.0, 512: 2.0, 1024: 3.0}]),
        row(LOSS, "b", 1024, why, text=document(0)),
        *reading("b", 256, [{256: 1.25}]),
    ]
    cells = result_tables(rows)["loss"].cells
    kept = cells["b", 256]
    assert kept.value is not None and kept.value.mean == 1.25 and kept.refused is None
    for n in (512, 1024):
        assert cells["b", n].value is None
        assert cells["b", n].refused == why["refused"]
        assert not cells["b", n].best and not cells["b", n].tied and cells["b", n].over is None


def test_answers_are_paired_by_question() -> None:
    families = [f"family {n}" for n in range(5)]
    few = [True, False, False, False]
    a = [answered("a", 512, [0.1] * 4, [True] * 4, family) for family in families]
    own = [answered(OWN, 512, [0.1, 3.0, 3.0, 3.0], few, family) for family in families]
    near = [answered("b", 512, [0.2] * 4, [True] * 4, family) for family in families[1:]]
    made = result_tables([*a, *own, *near])
    board = made["retrieval"]
    best = board.cells["a", 512]
    assert best.value is not None and best.over is not None
    assert (best.value.mean, best.value.n, best.best) == (1.0, 20, True)
    assert best.value.low == pytest.approx(0.8389, abs=1e-4)  # Wilson, 20 of 20
    p12, p21, n = 15.5 / 22, 0.5 / 22, 22  # Agresti and Min: 15 gained, none lost, of 20
    half = 1.959964 * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / n)
    assert best.over.mean == 0.75
    assert best.over.low == pytest.approx(p12 - p21 - half, abs=1e-5)
    assert not board.cells[BASELINE, 512].tied
    other = board.cells["b", 512]
    assert other.value is not None and other.value.n == 16
    assert other.tied and not other.best  # 16 of 16: as good, on fewer questions
    assert other.over is not None and other.over.n == 16
    losses = made["answer_loss"].cells  # of the same rows; these tell a from b
    assert losses["a", 512].best and not losses["b", 512].best
    over = losses["b", 512].over
    assert over is not None and over.mean == pytest.approx(0.1 - 2.9 * 3 / 4, abs=1e-9)


def test_kept_context_is_a_ratio_of_sums_over_all_rounds() -> None:
    rows = [kept("b", 512, [0.2, 0.4]), kept("b", 512, [0.6, 0.4], round=1), kept(OWN, 512, [0.1])]
    rows[0].value["gains"][0][:] = [4.0, 20.0]  # of twice as many nats as the others
    board = result_tables(rows)["kept_context"]
    value = board.cells["b", 512].value
    parts, wholes = [4.0, 4.0, 6.0, 4.0], [20.0, 10.0, 10.0, 10.0]
    mean = sum(parts) / sum(wholes)
    off = sum((p - mean * w) ** 2 for p, w in zip(parts, wholes, strict=True))
    half = 3.182446 * math.sqrt(4 / 3 * off) / sum(wholes)
    assert value is not None and value.n == 4
    assert (value.mean, value.low, value.high) == pytest.approx((mean, mean - half, mean + half))
    assert board.cells["b", 512].best and board.metric.is_share


def test_costs_are_tied_within_what_timings_vary_by() -> None:
    rows = [cost(OWN, 512, 1000.0), cost("b", 512, 960.0), cost("c", 512, 500.0)]
    made = result_tables(rows)
    assert [*made] == ["prefill", "decode", "memory"]
    prefill = made["prefill"].cells
    marks = {s: (prefill[s, 512].best, prefill[s, 512].tied) for s in (BASELINE, "b", "c")}
    assert marks == {BASELINE: (True, False), "b": (False, True), "c": (False, False)}
    assert made["decode"].metric.lower_is_better and not made["prefill"].metric.lower_is_better
    assert not any(made["memory"].cells[s, 512].best for s in (BASELINE, "b", "c"))  # all alike
    over = prefill["c", 512].over
    assert over is not None and over.mean == -500


def test_what_is_asked_twice_counts_once_with_the_younger_answer() -> None:
    old, new = context("b", 512, [5.0, 6.0]), context("b", 512, [1.0, 2.0])
    old = [replace(one, made="2026-01-01") for one in old]
    new = [replace(one, made="2026-02-01") for one in new]
    for rows in ([*old, *new], [*new, *old]):
        value = result_tables(rows)["context"].cells["b", 512].value
        assert value is not None and (value.mean, value.n) == (1.5, 2)


def test_two_schemes_under_one_label_go_by_their_written_forms() -> None:
    rows = [*context(OWN, 512, [3.0]), *context("b", 512, [2.0]), *context("c", 512, [2.0])]
    alike = [replace(one, value={**one.value, "label": "same"}) for one in rows[1:]]
    assert labels([rows[0], *alike]) == {OWN: BASELINE, "b": "b", "c": "c"}
    assert result_tables([rows[0], *alike])["context"].labels == (BASELINE, "b", "c")


def test_curves_are_of_the_longest_text_that_was_read() -> None:
    def binned(length: int, at: int, loss: float) -> dict[str, object]:
        return {"means": [], "bins": [[0, 128, loss], [128, length, loss + at]]}

    rows = [row(LOSS, "b", 512, binned(512, d, 2.0 + d), text=document(d)) for d in range(3)]
    rows += [row(LOSS, "b", 256, binned(256, d, 9.0), text=document(d)) for d in range(3)]
    (first, second) = curves(rows)["b"]
    assert (first[:2], second[:2]) == ((0, 128), (128, 512))
    about(first[2], [2.0, 3.0, 4.0])
    about(second[2], [2.0, 4.0, 6.0])


def test_families_are_told_apart() -> None:
    rows = [
        answered("b", 512, [0.1, 0.1, 0.1, 2.0]),
        answered("b", 512, [2.0] * 4, family="keys"),
        answered("b", 256, [0.2] * 4),
        answered("c", 256, [3.0] * 4, family="values"),
    ]
    found = by_family(rows)
    assert {place: one.mean for place, one in found["b"].items()} == {
        ("keys", 512): 0.0,
        ("passkey", 256): 1.0,
        ("passkey", 512): 0.75,
    }
    assert [*found["b"]] == sorted(found["b"]) and [*found["c"]] == [("values", 256)]
    one = found["b"]["passkey", 512]
    assert (one.low, one.high) == pytest.approx((0.3006, 0.9544), abs=1e-4)
    losses = by_family(rows, ANSWER_LOSS)["b"]
    assert losses["passkey", 512].mean == pytest.approx(0.575)


def test_a_loss_far_over_the_windows_is_insane() -> None:
    rows = [*context(OWN, 256, [2.0, 3.0]), *context(OWN, 512, [9.0, 9.0])]
    rows += [*context("b", 256, [2.2, 3.2]), *context("b", 512, [2.9, 3.0])]
    rows += [*context("c", 512, [4.0, 4.2])]
    assert insane(rows) == {(BASELINE, 512), ("c", 512)}
    assert insane(rows[4:]) == set()  # without the baseline in its window none is known
    means = [{256: 2.0, 512: 9.0}] * 2  # where the last tokens were not scored
    assert insane(reading(OWN, 512, means)) == {(BASELINE, 512)}


def test_speed_is_that_of_alternating_rounds() -> None:
    rows = [cost(OWN, 512, 1000.0), cost("b", 512, 500.0)]
    alone = relative_speed(rows, "b", 512)  # older rows: each on its own
    assert alone == Interval(0.5, 0.5, 0.5, 1)
    beside = replace(rows[1], value={**rows[1].value, "speed": [0.9, 0.8, 1.0], "rounds": 3})
    assert relative_speed([rows[0], beside], "b", 512) == Interval(0.9, 0.8, 1.0, 3)
    assert relative_speed(rows, "b", 256) is relative_speed(rows[1:], "b", 512) is None


def test_the_tax_is_paid_inside_the_window() -> None:
    own = [{128: 3.0, 256: 2.0 + d, 512: 9.0} for d in range(3)]
    other = [{128: 9.0, 256: 2.1 + d + d / 100, 512: 2.0} for d in range(3)]
    found = in_window_cost([*reading(OWN, 512, own), *reading("b", 512, other)])
    assert [*found] == ["b"]
    about(found["b"], [0.10, 0.11, 0.12])
    assert (
        in_window_cost(reading("b", 512, other)) == {}
    )  # without the untouched model none is known


def test_nothing_measured_makes_no_boards() -> None:
    assert result_tables([]) == curves([]) == in_window_cost([]) == by_family([]) == {}
    assert insane([]) == set() and relative_speed([], "b", 512) is None


def test_no_torch_is_needed() -> None:
    code = "import sys, longitude.eval.tables; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
