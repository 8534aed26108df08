"""`longitude export` from the command line."""

import json
from pathlib import Path

import pytest

from longitude.cli.main import run
from longitude.core.store import Store
from longitude.eval.records import LOSS, ResultKey, Subject
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder

YARN = "rope(frequencies=yarn(4, original=256))"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["export", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_a_command_is_printed_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["export", "tiny-rope", "--scheme", YARN, "--for", "vllm"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("vllm serve ")
    assert out.count("\n") == 1
    assert "--max-model-len 1024" in out
    assert err == ""
    assert not list(tmp_path.iterdir())


def test_everything_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = decoder("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    trained = model.config.max_position_embeddings
    file = write_gguf(tmp_path / "m.gguf", model)
    scheme = f"rope(frequencies=yarn(4, original={trained}, attention_factor=1.0, fast=20))"
    words = ["--scheme", scheme, "--for", "all", "--out", str(tmp_path / "out"), "--json"]
    assert run(["export", str(file), *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["target"] == 4 * trained
    assert {one["runtime"] for one in told["exports"] if one["refused"]} <= {"torchtitan"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    commands = {"vllm.sh", "sglang.sh", "llama.cpp.sh", "gguf.sh", "Modelfile"}
    assert names >= commands | {"axolotl.yaml", "transformers", "README.md"}
    new = f"m-{4 * trained}.gguf"
    assert new in names
    assert (tmp_path / "out/Modelfile").read_text().startswith(f"FROM ./{new}\n")
    assert str(tmp_path / "out/transformers") in (tmp_path / "out/vllm.sh").read_text()
    assert json.loads((tmp_path / "out/transformers/config.json").read_text())["vocab_size"]
    assert "{f" not in "".join(one["text"] or "" for one in told["exports"])


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "add --scheme" in refused(capsys, "tiny-rope")
    assert "add --to" in refused(capsys, "tiny-rope", "--scheme", "rope(base=50000)")
    said = refused(capsys, "tiny-rope", "--scheme", "rope(remap=rerope(128))", "--for", "sglang",
                   "--to", "4x")  # fmt: skip
    assert "SGLang has no settings for rope(remap=rerope(128))" in said
    assert "nearest it can serve is rope(frequencies=yarn(4, original=256))" in said
    dynamic = "rope(frequencies=dynamic_ntk(256))"
    said = refused(capsys, "tiny-rope", "--scheme", dynamic, "--for", "sglang", "--to", "1024")
    base = f"{10000 * 4 ** (32 / 30):.6g}"
    assert f"rope(frequencies=ntk(4)), which is a rope_theta of {base}." in said
    said = refused(capsys, "tiny-rope", "--scheme", YARN, "--for", "vlm")
    assert "no runtime is called 'vlm'" in said
    many = ("--for", "vllm,sglang", "--version", "0.32")
    assert "--version applies to one" in refused(capsys, "tiny-rope", "--scheme", YARN, *many)
    assert "made of numbers" in refused(
        capsys, "tiny-rope", "--scheme", YARN, "--for", "vllm", "--version", "new"
    )
    out = ("--verify", "--out", str(tmp_path / "out"))
    said = refused(capsys, "tiny-rope", "--scheme", YARN, "--for", "sglang", *out)
    assert "--verify runs transformers, vllm" in said
    assert not (tmp_path / "out").exists()
    said = refused(
        capsys, "tiny-alibi", "--scheme", "ntk_alibi(4)", "--for", "sglang", "--to", "4x"
    )
    assert "export it for transformers or vllm" in said


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("recommendation.json", b'{"best": {"numbers": {}}}'),
        ("recommendation.json", b"[]"),
        ("recommendation.json", b""),
        ("summary.md", b"\xff"),
    ],
)
def test_a_damaged_run_is_told_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str, content: bytes
) -> None:
    subject = Subject("tiny-rope", "0", "rope()", "rope", 256, "float32", "cpu")
    with Store(tmp_path / "results.sqlite") as store:
        store.put(ResultKey(LOSS, subject, "rope()", 1024).to_json(), {"label": "baseline"})
    best = {"label": "yarn", "scheme": YARN, "numbers": {"target": 1024, "own": "baseline"}}
    advice = {"best": best, "runtimes": [{"what": "sglang", **best}]}
    (tmp_path / "recommendation.json").write_text(json.dumps(advice))
    assert run(["export", str(tmp_path), "--for", "sglang"]) == 0
    assert "yarn" in capsys.readouterr().out
    (tmp_path / file).write_bytes(content)
    assert "run the same `longitude extend` again" in refused(
        capsys, str(tmp_path), "--for", "sglang"
    )
