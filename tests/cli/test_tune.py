"""`longitude tune` as it is typed: a whole run in small, its mistakes, and its help."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import longitude.hf as lh
from longitude.cli import common
from longitude.cli.main import run
from longitude.training.loop import Stopped
from longitude.training.tune.evaluate import make_test_set
from longitude.training.tune.recipes import RECIPES
from longitude.training.tune.run import TuneOptions
from tests.cli.conftest import Ran
from tests.hf.adapters import with_lora
from tests.training.tune.test_evaluate import TUNED

SMALL = ("--steps", "2", "--batch", "1", "--to", "2x", "--docs", "2", "--tasks", "none")
PI = "rope(frequencies=linear(2))"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some 60,000 bytes, in which little is said twice."""
    folder = tmp_path_factory.mktemp("text")
    lines = (f"line {n} says that {n * n % 977} is not {n * 7 % 1013}\n" for n in range(1500))
    (folder / "text.txt").write_text("".join(lines))
    return folder / "text.txt"


def printed_by(*args: str) -> tuple[str, str]:
    """What a good command prints and says."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert run([*args]) == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def given(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a whole run of two steps, all weights."""
    out = tmp_path_factory.mktemp("tune") / "run"
    how = ("--recipe", "pi", "--full", "--text", str(text), *SMALL)
    return ["tune", "tiny-rope", *how, "--out", str(out)]


@pytest.fixture(scope="module")
def first(given: list[str]) -> tuple[str, str]:
    """What the run prints and says."""
    return printed_by(*given)


@pytest.fixture(scope="module")
def tuned(given: list[str], first: tuple[str, str]) -> Path:
    """Its folder."""
    return Path(given[-1])


@pytest.fixture(scope="module")
def outcome(given: list[str], tuned: Path) -> dict[str, Any]:
    """What the same command says when all is done already."""
    before = (tuned / "model" / "model.safetensors").stat().st_mtime_ns
    out, _ = printed_by(*given, "--json")
    assert (tuned / "model" / "model.safetensors").stat().st_mtime_ns == before
    return json.loads(out)


def test_it_leaves_a_model_a_report_and_its_question(tuned: Path) -> None:
    files = {"tune.json", "training.json", "training.png", "model", "report"}
    assert {f.name for f in tuned.iterdir()} == files
    report = {f.name for f in (tuned / "report").iterdir()}
    assert {"results.sqlite", "rows.jsonl", "report.html", "summary.md"} <= report
    model, tokenizer = lh.load(tuned / "model", quiet=True)
    assert tokenizer is not None and "linear(2" in str(lh.scheme_of(model))
    assert "| `after` |" in (tuned / "report" / "summary.md").read_text()


def test_the_table_and_the_news(first: tuple[str, str], tuned: Path) -> None:
    out, err = first
    assert "after" in out and "before" in out and "baseline" in out
    assert "2 steps of pi" in " ".join(out.split())
    assert f"{tuned / 'model'}: checkpoint of tiny-rope for 512 tokens" in out
    assert "report.html" in err


def test_the_same_command_again_tells_the_same(outcome: dict[str, Any], tuned: Path) -> None:
    assert outcome["kind"] == "checkpoint" and outcome["steps"] == 2 and outcome["target"] == 512
    assert outcome["folder"] == str(tuned / "model")
    assert set(outcome["measured"]) == {"baseline", "before", "after"}


def last_tokens(model: Any, ids: torch.Tensor, tail: int) -> float:
    with torch.inference_mode():
        logits = model(ids[None, :-1]).logits[0, -tail:].double()
    return float(cross_entropy(logits, ids[1:][-tail:]))


def test_before_and_after_are_what_the_models_say(
    outcome: dict[str, Any], tuned: Path, text: Path
) -> None:
    found = outcome["measured"]
    options = TuneOptions(docs=2, tasks=(), text=(str(text),))
    test_set = make_test_set("tiny-rope", "2x", options)
    plain, _ = lh.load("tiny-rope", dtype="float32", quiet=True)
    trained, _ = lh.load(tuned / "model", dtype="float32", quiet=True)
    documents = [document.last(512) for document in test_set.documents]
    models = {"baseline": plain, "after": trained}
    for label, model in models.items():
        mean = sum(last_tokens(model, ids, 128) for ids in documents) / 2
        assert found[label]["context"]["512"]["mean"] == pytest.approx(mean, abs=1e-4)
    with lh.patched(plain, PI):
        mean = sum(last_tokens(plain, ids, 128) for ids in documents) / 2
    assert found["before"]["context"]["512"]["mean"] == pytest.approx(mean, abs=1e-4)
    assert found["after"]["context"] != found["before"]["context"]
    for label in ("before", "after"):  # past the base's window, by which verdicts compare them
        assert found[label]["past_window"]["512"]["n"] == 2


def test_it_is_measured_on_what_training_never_saw(text: Path) -> None:
    test_set = make_test_set("tiny-rope", "2x", TuneOptions(docs=9, text=(str(text),)))
    seen = text.read_bytes()[: len(text.read_bytes()) * 9 // 10]
    for document in test_set.documents:
        assert bytes(document.ids[document.special :][:64].tolist()) not in seen


def test_a_checkpoint_is_exported_for_its_target(
    tuned: Path, tmp_path: Path, longitude: Callable[..., Ran]
) -> None:
    code, _, err = longitude("export", str(tuned / "model"), "--out", str(tmp_path / "out"))
    assert code == 0, err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 512  # the window was raised: not twice that
    assert config["rope_parameters"]["factor"] == 2


def test_stopped_it_says_how_to_go_on(
    text: Path, tmp_path: Path, longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: Any) -> None:
        raise Stopped("stopped after step 7 of 9: the same command continues.")

    monkeypatch.setattr("longitude.training.api.fine_tune", stopped)
    given = ("tiny-rope", "--text", str(text), "--full", *SMALL, "--out", str(tmp_path / "run"))
    code, _, err = longitude("tune", *given, "--recipe", "pi")
    assert code == 130 and "stopped after step 7 of 9: the same command continues" in err


def test_only_the_first_of_many_processes_speaks_and_measures(
    given: list[str], tuned: Path, longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longitude.training.api.fine_tune", lambda *given: TUNED)
    monkeypatch.setenv("RANK", "1")
    assert longitude(*given) == (0, "", "")


def test_another_question_in_the_same_folder_is_refused(
    given: list[str], tuned: Path, longitude: Callable[..., Ran]
) -> None:
    code, _, err = longitude(*given, "--seed", "1")
    assert code == 2 and "holds another run" in err
    code, _, err = longitude(*given, "--no-resume")
    assert code == 2 and "holds this very run" in err


def test_a_run_itself_is_no_model(tuned: Path, longitude: Callable[..., Ran]) -> None:
    code, _, err = longitude("lint", str(tuned))
    assert code == 2 and f"give {tuned / 'model'}" in err


def test_an_adapter_comes_out_and_is_exported(
    text: Path, tmp_path: Path, longitude: Callable[..., Ran]
) -> None:
    pytest.importorskip("peft")
    given = ("tiny-rope", "--recipe", "yarn", "--lora", "--text", str(text), *SMALL)
    out = tmp_path / "run"
    code, printed, _ = longitude("tune", *given, "--no-measure", "--out", str(out), "--json")
    found = json.loads(printed)
    assert code == 0 and found["kind"] == "adapter" and found["measured"] is None
    assert not (out / "report").exists()
    held = json.loads((out / "model" / "longitude.json").read_text())
    assert "yarn(2" in held["scheme"] and held["base"]["name"] == "tiny-rope"
    code, _, err = longitude("export", str(out / "model"), "--out", str(tmp_path / "merged"))
    assert code == 0, err
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == 512


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_data_on_stdout_leaves_progress_to_stderr(
    text: Path,
    tmp_path: Path,
    longitude: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    quiet: tuple[str, ...],
) -> None:
    monkeypatch.setattr(common, "LOG_INTERVAL", 0.0)
    given = ("tiny-rope", "--recipe", "pi", "--full", "--text", str(text), *SMALL, "--no-measure")
    code, printed, err = longitude("tune", *given, *quiet, "--json", "--out", str(tmp_path / "run"))
    assert code == 0 and json.loads(printed)["steps"] == 2
    assert "training.png" in err if not quiet else err == ""
    assert quiet or ("tokens/s" in err and "left" in err)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--steps", "0"), "steps must be above zero, but got 0"),
        (("--steps", "-3"), "steps must be above zero, but got -3"),
        (("--batch", "0"), "must be above zero"),
        (("--lr", "nan"), "must be above zero"),
        (("--to", "128"), "it already covers that"),
        (("--to", "far"), "--to takes a length"),
        (("--recipe", "alibi"), "recipe alibi is for models with alibi positions"),
        (("--recipe", "learned"), "recipe learned is for models with learned positions"),
        (("--recipe", "yran"), "no recipe is called 'yran': yarn is near"),
        (("--scheme", "rope("), "rope("),
        (("--seq", "4096"), "reach past --to"),
        (("--positions", "sideways"), "sideways"),
        (("--docs", "0"), "--docs must be at least 1"),
        (("--tasks", "riddles"), "no task is called 'riddles'"),
        (("--report-to", "paper"), "--report-to is tensorboard, trackio, wandb"),
        (("--dtype", "int8"), "--dtype is"),
        (("--save-every", "0"), "--save-every"),
        (("--rank", "8"), "got --full and 8: leave one out"),
    ],
)
def test_mistakes_are_told_before_any_work(
    args: tuple[str, ...],
    sentence: str,
    text: Path,
    tmp_path: Path,
    longitude: Callable[..., Ran],
) -> None:
    out = tmp_path / "run"
    given = ("tune", "tiny-rope", "--full", "--text", str(text), "--to", "2x", *args)
    code, printed, err = longitude(*given, "--out", str(out), "--quiet")
    assert code == 2 and sentence in err and err.count("\n") == 1, err
    assert not printed and not out.exists()


def test_text_shorter_than_the_sequences(tmp_path: Path, longitude: Callable[..., Ran]) -> None:
    (tmp_path / "short.txt").write_text("not much to say\n" * 20)
    given = ("tune", "tiny-rope", "--full", "--text", str(tmp_path / "short.txt"), "--to", "2x")
    out = ("--out", str(tmp_path / "run"), "--quiet")
    code, _, err = longitude(*given, "--no-measure", *out)
    assert code == 2 and "but one sequence takes 513" in err
    code, _, err = longitude(*given, *out)
    assert code == 2 and "held out of training to measure on is too short" in err
    assert "--no-measure" in err and not (tmp_path / "run").exists()


def test_an_adapter_of_another_base(
    text: Path, tmp_path: Path, longitude: Callable[..., Ran]
) -> None:
    pytest.importorskip("peft")
    base, out = tmp_path / "base", tmp_path / "run"
    model, tokenizer = lh.load("tiny-rope", dtype="float32", quiet=True)
    lh.save(model, base, tokenizer)
    lh.save_adapter(with_lora(model), tmp_path / "adapter", str(base))
    given = ("tune", str(tmp_path / "adapter"), "--text", str(text), *SMALL, "--out", str(out))
    code, _, err = longitude(*given)
    assert code == 2 and "is an adapter" in err and "or train it --full" in err
    other, _ = lh.load("tiny-rope", dtype="float32", quiet=True)
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(2)
        other.model.norm.weight.mul_(2)
        other.model.layers[0].self_attn.q_proj.weight.mul_(2)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    lh.save(other, base, tokenizer)
    code, _, err = longitude(*given, "--full", "--quiet")
    assert code == 2 and "has other weights" in err and not out.exists()


def test_the_help_names_every_recipe_with_its_paper(longitude: Callable[..., Ran]) -> None:
    _, out, _ = longitude("tune", "--help")
    words = " ".join(out.split())
    for name, recipe in RECIPES.items():
        assert f"{name}: " in words
        papers = re.findall(r"\d{4}\.\d{5}|(?<=archives/)\d+", recipe.paper)
        assert any(paper in words for paper in papers), recipe.paper
