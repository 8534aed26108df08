"""The terminal's table: what matters first, and what finds no room left out from the right."""

from __future__ import annotations

import io

from rich.console import Console

from longitude.eval.records import COST
from longitude.viz import extend as report
from longitude.viz.section import INSANE, Section, section
from tests.viz import rows


def shown(section: Section, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    report.show_section(section, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def heads(width: int) -> list[str]:
    lines = shown(section(rows.FOUND, rows.ADVICE), width).splitlines()
    below = next(n for n, line in enumerate(lines) if line.startswith("method"))
    return f"{lines[below - 1]} {lines[below]}".split()


def test_a_hundred_columns_tell_all_that_matters() -> None:
    wanted = "kept kept kept kept effective answer in-window"
    below = "method 256 512 1,024 2,048 length retrieval loss loss cost prefill decode memory"
    assert heads(120) == f"{wanted} {below}".split()
    assert heads(46) == "kept kept kept kept method 256 512 1,024 2,048".split()


def test_only_what_is_shown_is_explained() -> None:
    one = section(rows.FOUND, rows.ADVICE)
    assert "effective length: the most tokens" in " ".join(shown(one, 100).split())
    assert "effective length: the most tokens" not in " ".join(shown(one, 46).split())


def test_of_many_lengths_a_few_are_shown() -> None:
    doubled = [2**n for n in range(6, 18)]
    few = report.some_lengths(doubled, 256)
    assert few == sorted({*few}) and {*few} <= {*doubled} and len(few) == 5
    assert (few[0], few[-1]) == (256, 131072)
    for lengths, chosen in {(128, 256, 512): [256, 512], (512,): [512], (64, 128): [128]}.items():
        assert report.some_lengths(lengths, 256) == chosen


def test_search_scores_notes_and_commands_are_told() -> None:
    text = shown(section(rows.FOUND, rows.ADVICE, rows.NEXT), 120)
    assert "leaky_rerope gains +0.0210 nats a token. rope(remap=leaky_rerope(96, 16))" in text
    assert "– left out to fit into 10m" in text and "lambada, acc,none" in text
    listed = [{"title": t, "command": c} for t, c in rows.NEXT]
    console = Console(file=io.StringIO(), width=120, highlight=False)
    report.show_section(section(rows.FOUND, {**rows.ADVICE, "next": listed}), console)
    assert console.file.getvalue() == text  # type: ignore[attr-defined]


def test_a_share_that_means_nothing_is_marked() -> None:
    whole = section(rows.FOUND)
    assert whole.shown("linear", "kept_context").sign == "†"
    assert whole.shown("linear", "retrieval").sign == whole.shown("yarn", "kept_context").sign == ""
    assert "-61 %†" in shown(whole, 100) and INSANE in shown(whole, 100)
    sane = section([one for one in rows.FOUND if one.label not in ("baseline", "linear")])
    assert "†" not in shown(sane, 100)


def test_cost_alone_has_its_columns() -> None:
    cost = section([one for one in rows.FOUND if one.key.measure == COST])
    assert "prefill  decode" in shown(cost, 100)
