"""A rewritten GGUF file, read by the `gguf` package: other keys, the same weights."""

import errno
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from longitude import UserError
from longitude.hf.gguf_reader import BLOCKS, read_layout
from longitude.hf.gguf_writer import rewrite
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder

HALF = 8


def written(folder: Path, keys: dict[str, Any] | None = None, **tensors: Any) -> Path:
    extra = {f"{name}.weight": values for name, values in tensors.items()}
    return write_gguf(folder / "in.gguf", decoder("llama"), keys, extra)


def fields(path: Path) -> dict[str, Any]:
    return {n: f.contents() for n, f in gguf.GGUFReader(path).fields.items() if "GGUF." not in n}


def weights(path: Path) -> dict[str, tuple[int, bytes]]:
    return {t.name: (t.tensor_type, t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


def test_the_block_sizes_are_ggmls() -> None:
    theirs = {int(kind): size for kind, size in gguf.constants.GGML_QUANT_SIZES.items()}
    assert len(theirs) > 25 and BLOCKS == BLOCKS | theirs  # an older `gguf` knows fewer


@pytest.mark.parametrize("blocks", [False, True], ids=["float32", "quantised"])
def test_the_layout_is_what_gguf_reads(tmp_path: Path, blocks: bool) -> None:
    model = decoder("llama", vocab_size=320)
    file = write_gguf(tmp_path / "in.gguf", model, vocabulary=True, blocks=blocks)
    ours, theirs = read_layout(file), gguf.GGUFReader(file)
    assert ours.data == theirs.data_offset and ours.step == theirs.alignment
    places = [(t.name, ours.data + t.offset, t.size, t.kind) for t in ours.tensors]
    assert places == [
        (t.name, t.data_offset, t.n_bytes, t.tensor_type.value) for t in theirs.tensors
    ]
    for name, value in ours.keys.items():
        found = theirs.fields[name]
        assert value in (found.contents(), len(found.data))  # of a vocabulary its length


def test_keys_change_and_weights_stay(tmp_path: Path) -> None:
    source = written(tmp_path, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    before, out = source.read_bytes(), tmp_path / "new" / "out.gguf"
    keys = {
        "llama.context_length": 4096,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": None,
        "llama.rope.scaling.attn_factor": 1.25,
        "general.name": "größer",
    }
    rewrite(read_layout(source), out, keys, {})
    wanted = fields(source) | keys
    del wanted["llama.rope.scaling.factor"]
    assert fields(out) == wanted
    assert list(fields(out))[:4] == list(fields(source))[:4]
    assert weights(out) == weights(source) and source.read_bytes() == before
    assert [p.name for p in out.parent.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("held", [False, True], ids=["added", "replaced"])
def test_a_tensor_is_added_or_replaced(tmp_path: Path, held: bool) -> None:
    old = {"rope_freqs": [1.0] * HALF} if held else {}
    source, out = written(tmp_path, **old), tmp_path / "out.gguf"
    g = [1.0 + i / 3 for i in range(HALF)]
    rewrite(read_layout(source), out, {}, {"rope_freqs.weight": g})
    found, before = weights(out), weights(source)
    kind, data = found["rope_freqs.weight"]
    assert kind == 0 and np.frombuffer(data, np.float32).tolist() == np.float32(g).tolist()
    assert {n: w for n, w in found.items() if "rope" not in n} == {
        n: w for n, w in before.items() if "rope" not in n
    }
    ends = read_layout(out)
    places = [(t.offset, t.offset + -(-t.size // ends.step) * ends.step) for t in ends.tensors]
    assert [s for s, _ in places[1:]] == [e for _, e in places[:-1]]  # llama.cpp allows no gap
    assert out.stat().st_size == ends.data + places[-1][1]


def test_without_the_kernels_copy_the_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path)
    rewrite(read_layout(source), tmp_path / "a.gguf", {"x": 1}, {})

    def unable(*_: Any) -> int:
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", unable, raising=False)
    monkeypatch.setattr(sys.modules["longitude.hf.gguf_writer"], "CHUNK", 1000)
    rewrite(read_layout(source), tmp_path / "b.gguf", {"x": 1}, {})
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_the_real_file(smollm2_file: Path, tmp_path: Path) -> None:
    layout, out = read_layout(smollm2_file), tmp_path / "out.gguf"
    rewrite(layout, out, {"llama.context_length": 32768}, {"rope_freqs.weight": [2.0] * 32})
    found = read_layout(out)
    assert found.keys == layout.keys | {"llama.context_length": 32768}
    with smollm2_file.open("rb") as old, out.open("rb") as new:
        old.seek(layout.data), new.seek(found.data)
        assert old.read(layout.used) == new.read(layout.used)
    assert found.floats(found.tensors[-1]) == (2.0,) * 32


def refused(source: Path, target: Path, tensors: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError) as told:
        rewrite(read_layout(source), target, {}, tensors or {})
    sentence = str(told.value)
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence


def test_mistakes_get_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path, rope_freqs=[1.0] * HALF)
    assert "itself" in refused(source, source)
    assert "folder" in refused(source, tmp_path)
    assert "float32 numbers" in refused(source, tmp_path / "o", {"rope_freqs.weight": [1.0] * 3})
    (tmp_path / "file").write_text("")
    assert "can't be written" in refused(source, tmp_path / "file" / "o.gguf")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    assert "no space left" in refused(source, tmp_path / "o.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "in.gguf"]


def test_a_read_only_folder_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = written(tmp_path), tmp_path / "closed"
    folder.mkdir(mode=0o555)
    stock = Path.open

    def closed(path: Path, mode: str = "r", *more: Any) -> Any:
        if "w" in mode and path.parent == folder:  # root may write there all the same
            raise PermissionError(errno.EACCES, "Permission denied")
        return stock(path, mode, *more)

    monkeypatch.setattr(Path, "open", closed)
    assert "Permission denied" in refused(source, folder / "o.gguf")


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path)
    source.write_bytes(source.read_bytes()[:-40])
    with pytest.raises(UserError, match="cut short"):
        read_layout(source)


def stuck(source: Path, out: Path) -> None:
    """Write until the first byte of weights, and hang there."""
    os.copy_file_range = lambda *_: time.sleep(60)
    rewrite(read_layout(source), out, {}, {})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_leaves_no_file_of_the_name(tmp_path: Path) -> None:
    source, out = written(tmp_path), tmp_path / "out.gguf"
    process = multiprocessing.get_context("fork").Process(target=stuck, args=(source, out))
    process.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.gguf.*.part")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(tmp_path.glob(".out.gguf.*.part"))  # it had begun
    process.kill()
    process.join()
    assert not out.exists()
    rewrite(read_layout(source), out, {}, {})  # what it left is in nobody's way
    assert weights(out) == weights(source)
