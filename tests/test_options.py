"""Options and models may be given as one writes them in Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import longitude
from longitude.options import ExploreOptions, ExportOptions, ExtendOptions, LintOptions
from longitude.training.options import LabOptions, TuneOptions

TINY = Path(longitude.__file__).parent / "assets" / "tiny-rope"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("text", "book.txt", ("book.txt",)),
        ("text", Path("a") / "b.txt", (str(Path("a") / "b.txt"),)),
        ("text", ["a", Path("b")], ("a", "b")),
        ("text", None, ()),
        ("tasks", "passkey, keys", ("passkey", "keys")),
        ("tasks", "none", ()),
        ("tasks", ["passkey"], ("passkey",)),
        ("lengths", 512, (512,)),
        ("lengths", "2048,512,512", (512, 2048)),
        ("lengths", [2048, 512], (2048, 512)),
        ("lengths", "", ()),
        ("methods", ["yarn", "rerope(64)"], "yarn; rerope(64)"),
        ("methods", "yarn; rerope", "yarn; rerope"),
    ],
)
def test_one_or_several_in_any_form(name: str, given: Any, expected: Any) -> None:
    assert getattr(ExtendOptions(**{name: given}), name) == expected
    assert getattr(replace(ExtendOptions(), **{name: given}), name) == expected


def test_other_commands_take_the_same_forms() -> None:
    assert ExportOptions(runtimes=["vllm", "mlx"]).runtimes == "vllm,mlx"  # type: ignore[arg-type]
    assert LintOptions(runtimes=("vllm",)).runtimes == "vllm"  # type: ignore[arg-type]
    assert ExploreOptions(schemes=["yarn", "rope()"]).schemes == "yarn; rope()"  # type: ignore[arg-type]
    assert LabOptions(seeds=3).seeds == (3,)  # type: ignore[arg-type]
    assert TuneOptions(text="book.txt").text == ("book.txt",)  # type: ignore[arg-type]
    with pytest.raises(longitude.UserError, match=r"--lengths takes whole numbers, but got 'a'"):
        ExtendOptions(lengths="a")  # type: ignore[arg-type]


def test_a_model_and_a_file_may_be_paths() -> None:
    assert longitude.inspect(TINY).table() == longitude.inspect(str(TINY)).table()
    assert longitude.lint(TINY).to_json() == longitude.lint(str(TINY)).to_json()
    for missing in ("no.txt", Path("no.txt"), ["no.txt"]):
        with pytest.raises(longitude.UserError, match=r"there is no file 'no\.txt'"):
            longitude.read(missing, "What?")
