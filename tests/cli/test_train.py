"""`longitude train` and `longitude lab`: what they print, leave behind and refuse."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from longitude.core.validate import UserError
from longitude.training.checkpoint import HISTORY, STATE
from longitude.training.lab.run import MODEL, load

from .conftest import python

SMALL = ("--length", "64", "--size", "nano", "--steps", "2", "--batch", "2", "--device", "cpu")


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(30):
        (folder / f"{n}.txt").write_text(f"line {n} of some text, " * 60)
    return str(folder)


@pytest.mark.parametrize(
    ("scheme", "block", "home"),
    [("rope()", "llama", "llama"), ("learned(64)", "gpt", "gpt2"), ("alibi()", "gpt", "bloom")],
)
def test_a_home_computes_what_the_model_computes(longitude, text, tmp_path, scheme, block, home):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "run"
    settings = ("--scheme", scheme, "--block", block, "--text", text, "--out", str(out))
    code, printed, news = longitude("train", *SMALL, *settings, "--json")
    assert code == 0 and "stock transformers loads" in news.splitlines()[0]
    found = json.loads(printed)
    assert found["steps"] == 2 and found["hf"] == str(out / "hf")
    assert {p.name for p in out.iterdir()} == {"config.json", "hf", MODEL, HISTORY}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "hf").eval()
    assert theirs.config.model_type == home
    tokens = torch.randint(0, 256, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(tokens).logits, load(out)(tokens), rtol=0, atol=1e-4, check_stride=False
        )


def test_what_has_no_home_is_told_before_the_start(longitude, text, tmp_path):
    settings = ("--scheme", "t5()", "--text", text, "--out", str(tmp_path / "run"))
    code, _, news = longitude("train", *SMALL, *settings)
    assert code == 0 and news.startswith("t5() has no equivalent in stock transformers")
    assert not (tmp_path / "run" / "hf").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--text", "/no/such/file"), "there is no file or folder"),
        (("--length", "100000"), "a window of 100,000 takes"),
        (("--scheme", "rope(remap=rerope(64))"), "made for reading"),
        (("--scheme", "learned(63)"), "outside the table of 63"),
        (("--every", "nan"), "--every takes seconds, 0 or more, but got nan"),
        (("--every", "-1"), "--every takes seconds, 0 or more, but got -1.0"),
        (("--scheme", "rop()"), "no part is called"),
        (("--size", "huge"), "no size is called"),
        (("--block", "bert"), "no block is called"),
        (("--tasks", "chess"), "no task is called"),
        (("--device", "abacus"), "no device is called"),
        (("--device", "meta"), "cpu or cuda"),
        (("--dtype", "int3"), "--dtype"),
        (("--weights", "int3"), "--weights"),
        (("--steps", "0"), "steps must be"),
        (("--batch", "-2"), "batch must be"),
        (("--rate", "-1"), "rate must be"),
    ],
)
def test_mistakes_are_one_sentence_before_any_work(longitude, text, tmp_path, given, sentence):
    out = tmp_path / "run"
    named = dict(zip(SMALL[::2], SMALL[1::2], strict=True)) | {"--text": text, "--out": str(out)}
    named |= dict(zip(given[::2], given[1::2], strict=True))
    code, printed, news = longitude("train", *(word for pair in named.items() for word in pair))
    assert code == 2 and not printed and sentence in news
    assert len(news.strip().splitlines()) == 1 and not out.exists()


@pytest.mark.parametrize("command", ["train", "lab"])
def test_quiet_is_the_result_alone(longitude, text, tmp_path, command):
    settings = ("--text", text, "--out", str(tmp_path / "run"), "--quiet")
    settings += ("--schemes", "rope()", "--excerpts", "2") if command == "lab" else ()
    code, printed, news = longitude(command, *SMALL, *settings)
    assert (code, news) == (0, "") and printed


@pytest.mark.parametrize("command", ["inspect", "lint"])
def test_a_run_is_no_model_but_holds_one(longitude, text, tmp_path, command):
    run = tmp_path / "run"
    (run / "hf").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "hf" / "config.json").write_text("{}")
    code, printed, news = longitude(command, str(run))
    assert (code, printed) == (2, "") and news.endswith(f"give {run / 'hf'}, which is in it.\n")


def test_a_folder_with_another_run_is_refused(longitude, text, tmp_path):
    settings = ("--text", text, "--out", str(tmp_path / "run"))
    assert longitude("train", *SMALL, *settings)[0] == 0
    for more, sentence in [
        (("--seed", "3"), "another run (its seed is 0, not 3)"),
        ((), "this very run, which is done"),
    ]:
        code, _, news = longitude("train", *SMALL, *settings, *more)
        assert code == 2 and sentence in news
    code, printed, _ = longitude("train", *SMALL, *settings, "--resume")
    assert code == 0 and "after 2 steps" in printed


def test_the_lab_prints_rows_and_draws_them(longitude, text, tmp_path):
    settings = ("--text", text, "--out", str(tmp_path / "lab"), "--test", "64,128")
    schemes = ("--schemes", "rope(); learned(64)", "--tasks", "text,copy", "--seeds", "0,1")
    code, printed, _ = longitude("lab", *SMALL, *settings, *schemes, "--excerpts", "2")
    assert code == 0 and "text, trained at 64" in printed and "Loss by position" in printed
    assert "outside the table of 64" in printed
    rows = [json.loads(line) for line in (tmp_path / "lab" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 2 * 2
    page = (tmp_path / "lab" / "lab.html").read_text()
    assert "<script src" not in page and "https://" not in page.split("<script>")[0]
    assert not list(tmp_path.rglob(STATE))
    code, again, _ = longitude("lab", *SMALL, *settings, *schemes, "--excerpts", "2", "--json")
    assert code == 0 and len(json.loads(again)) == 16


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--test", "64,x"), "--test takes whole numbers"),
        (("--test", "1,64"), "two tokens"),
        (("--test", "1000000"), "test text has"),
        (("--seeds", "a"), "--seeds takes whole numbers"),
        (("--seeds", ""), "--seeds"),
        (("--schemes", ";"), "names none"),
        (("--schemes", "rope(); lm_infinite(3)"), "inside rope"),
        (("--excerpts", "0"), "--excerpts"),
        (("--problems", "0"), "--problems"),
    ],
)
def test_mistakes_of_the_lab(longitude, text, tmp_path, given, sentence):
    out = tmp_path / "lab"
    code, printed, news = longitude("lab", *SMALL, "--text", text, "--out", str(out), *given)
    assert code == 2 and not printed and sentence in news, news
    assert len(news.strip().splitlines()) == 1 and not out.exists()


def test_an_interrupted_run_says_how_to_resume(longitude, text, tmp_path, monkeypatch):
    from longitude.training import loop

    take = loop.take_step

    def interrupted(job, step, world):
        if step == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return take(job, step, world)

    out = ("--text", text, "--out", str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", interrupted)
        code, printed, news = longitude("train", *SMALL, *out)
    assert code == 130 and not printed
    assert news.endswith("stopped after step 1 of 2: add --resume to continue.\n")
    code, printed, _ = longitude("train", *SMALL, *out, "--resume")
    assert code == 0 and "after 2 steps" in printed


def test_an_interrupted_lab_says_how_to_resume(longitude, text, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    given = ("lab", *SMALL, "--text", text, "--out", str(tmp_path / "lab"))
    with monkeypatch.context() as patch:
        patch.setattr("longitude.training.lab.compare.evaluate", interrupted)
        code, printed, news = longitude(*given)
    assert code == 130 and not printed
    assert news.endswith("stopped: the same command resumes from here.\n")
    assert longitude(*given)[0] == 0


def test_damaged_files_of_a_run_are_told(longitude, text, tmp_path):
    given, run = (*SMALL, "--text", text), tmp_path / "run"
    trained = ("train", *given, "--out", str(run), "--resume")
    assert longitude(*trained)[0] == 0
    (run / HISTORY).write_text("{")
    code, _, news = longitude(*trained)
    assert code == 2 and f"{HISTORY} is no JSON" in news
    (run / MODEL).write_bytes(bytes(100))
    with pytest.raises(UserError, match=f"{MODEL} is damaged .*: delete it, and train again"):
        load(run)


def test_a_store_that_is_none_is_told(longitude, text, tmp_path):
    (tmp_path / "rows.sqlite").write_text("not a database, but long enough to look like one" * 40)
    code, _, news = longitude("lab", *SMALL, "--text", text, "--out", str(tmp_path))
    assert code == 2 and "rows.sqlite" in news


def test_help_explains_without_torch():
    program = (
        "import sys; from longitude.cli.main import run; "
        "codes = [run([name, '--help']) for name in ('train', 'lab', 'tune')]; "
        "assert 'torch' not in sys.modules; sys.exit(max(codes))"
    )
    ran = python("-c", program)
    assert ran.returncode == 0 and ran.stdout.count("--text") >= 3, ran.stderr
    assert "Without" in ran.stdout


def test_a_log_gets_a_line_now_and_then(longitude, text, tmp_path, monkeypatch):
    monkeypatch.setattr("longitude.cli.common.LOG_INTERVAL", 0.0)
    _, _, news = longitude("train", *SMALL, "--text", text, "--out", str(tmp_path / "run"))
    lines = news.splitlines()
    assert lines[1].startswith("rope() 1/2, loss ") and lines[1].endswith(" left")
    assert ", tokens/s " in lines[1] and lines[2].startswith("rope() 2/2")


def test_a_terminal_gets_a_bar(text, tmp_path, monkeypatch):
    from longitude.cli.main import run

    ours, theirs = pty.openpty()
    drawn: list[bytes] = []

    def follow() -> None:
        while chunk := _read(ours):
            drawn.append(chunk)

    reader = threading.Thread(target=follow)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert run(["train", *SMALL, "--text", text, "--out", str(tmp_path / "run")]) == 0
    reader.join()
    shown = b"".join(drawn).decode()
    assert "100%" in shown and "tokens/s" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the other end is closed
        return b""
