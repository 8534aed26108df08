"""`longitude check`: a scheme's properties, the table of all, and its mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from rich.cells import cell_len

from longitude.presets import PRESETS

from .conftest import Ran

SMALL = ("--length", "128", "--dim", "16", "--heads", "2")


def test_one_scheme_is_told_in_sentences(longitude: Callable[..., Ran]) -> None:
    code, out, err = longitude("check", "rope() + alibi()", *SMALL)
    assert (code, err) == (0, "") and out.startswith("rope() + alibi()\n128 tokens, 2 heads of 16")
    for name in ("uniqueness", "extrapolation", "relativity", "decay"):
        assert f"\n{name} " in out
    assert "0: a function of i - j." in out and "Trained at 32:" in out
    assert "Rotation" in out and "Abel bound" in out and "Bias" in out
    assert all(cell_len(line) <= 80 for line in out.splitlines())


def test_what_ends_is_said(longitude: Callable[..., Ran]) -> None:
    _, out, _ = longitude("check", "learned(64)", *SMALL)
    assert "no code past token 63" in " ".join(out.split())
    assert "learned is learned: its weights are drawn" in " ".join(out.split())


def test_what_no_memory_holds_is_no_fault_of_ours(longitude: Callable[..., Ran]) -> None:
    code, _, said = longitude("check", "learned(99999999999)", *SMALL)
    assert code == 1 and "memory ran out" in said and "a fault of longitude's" not in said


def test_data_is_data(longitude: Callable[..., Ran]) -> None:
    code, out, _ = longitude("check", "layers(rope(), t5())", *SMALL, "--trained", "16", "--json")
    data = json.loads(out)
    assert code == 0 and [s["layers"] for s in data["sheets"]] == [[0], [1]]
    turned, buckets = data["sheets"]
    assert turned["relativity"] == {"spread": 0, "share": 0, "uneven": 0, "inner": None}
    assert turned["extrapolation"]["trained"] == 16 and turned["extrapolation"]["pairs"] == 8
    assert buckets["uniqueness"]["least"] == 0
    assert [c["name"] for c in turned["decay"]] == ["rotation", "bound"]


def test_every_preset_stands_in_the_table(longitude: Callable[..., Ran]) -> None:
    sizes = ("--length", "48", "--trained", "16", "--dim", "8", "--heads", "2")
    code, out, err = longitude("check", "--all", *sizes, "--json")
    rows = json.loads(out)
    assert code == 0 and err.startswith("presets: ") and [r["name"] for r in rows] == [*PRESETS]
    of_larger_heads = {"qwen2_vl", "qwen3_vl"}  # their sections count 64 pairs
    assert {row["name"] for row in rows if row["refused"]} == of_larger_heads
    assert all(s["extrapolation"]["trained"] == 16 for row in rows for s in row["sheets"])


@pytest.mark.parametrize("markdown", [False, True])
def test_the_table_has_a_line_a_scheme(
    longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, markdown: bool
) -> None:
    from longitude.inspection import properties

    few = ("llama", "gpt2", "alibi_lm", "hwfa", "streaming_llm")
    monkeypatch.setattr(properties, "PRESETS", {name: PRESETS[name] for name in few})
    _, out, _ = longitude("check", "--all", *SMALL, *(["--markdown"] if markdown else []))
    lines = {
        line.strip("| `").split("`")[0].split("  ")[0].strip(): line for line in out.splitlines()
    }
    for name in ("llama", "gpt2", "alibi_lm", "hwfa 0–2", "hwfa 3", "streaming_llm"):
        assert name in lines, out
    assert "ends at 32" in lines["gpt2"] and "by mask" in lines["streaming_llm"]
    assert all(cell_len(line) <= 80 for line in out.splitlines()) or markdown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "one scheme in quotes, or --all"),
        (("rope()", "--all"), "one scheme in quotes, or --all"),
        (("rope()", "--markdown"), "--markdown writes the table of --all"),
        (("rop()",), "rope"),
        (("rope()", "--length", "1"), "give a length of 2"),
        (("rope()", "--dim", "7"), "can't be paired"),
        (("randomized(8) + rope()", "--length", "64"), "do not fit into 8 positions"),
        (("--all", "--length", "64", "--trained", "100"), "--trained below --length"),
    ],
)
def test_mistakes_are_one_sentence(
    longitude: Callable[..., Ran], args: tuple[str, ...], said: str
) -> None:
    code, out, err = longitude("check", *args)
    assert code == 2 and not out and err.count("\n") == 1 and said in err
