"""A checkpoint comes back as it was written, and what is wrong with one is one sentence."""

import json
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging
from transformers.utils.logging import get_verbosity, is_progress_bar_enabled

from longitude import UserError
from longitude.hf import load
from longitude.hf.source import ASSETS, TINY
from tests.hf.tiny import config_of, decoder

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
# what each architecture is made from; the names are those that config.architectures will hold
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForMaskedLM": ("bert", SMALL),
    "BertModel": ("bert", SMALL),
    "RobertaForMaskedLM": ("roberta", SMALL),
    "ModernBertForMaskedLM": ("modernbert", SMALL | {"pad_token_id": 0}),
    "T5ForConditionalGeneration": ("t5", T5),
    "T5EncoderModel": ("t5", T5),
    "LlamaForSequenceClassification": ("llama", SMALL | {"pad_token_id": 0}),
    "LlamaModel": ("llama", SMALL),
    "GPTNeoXForCausalLM": ("gpt_neox", SMALL),
    "OPTForCausalLM": ("opt", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "MptForCausalLM": ("mpt", {"d_model": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 61}),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama's folder, in bfloat16, its weights in one file and its embeddings untied."""
    folder = tmp_path_factory.mktemp("llama")
    decoder("llama").bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def said(name: Any, **options: Any) -> str:
    """The one sentence that a load is refused with."""
    with pytest.raises(UserError) as caught:
        load(name, **options)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".") and len(text) < 400
    return text


@pytest.mark.parametrize("name", TINY)
def test_the_packages_own_come_by_name(name: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()  # a folder of that name is another matter
    model, tokenizer = load(name, dtype="float32", quiet=True)
    own = load_file(ASSETS / name / "model.safetensors")
    for key, weight in model.state_dict().items():
        if key in own:
            torch.testing.assert_close(weight, own[key].float(), rtol=0, atol=0)
    assert tokenizer is not None
    ids = tokenizer("Longitude", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all() and tokenizer.decode(ids[0]) == "Longitude"
    assert "config.json" in said(f"./{name}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_loads_as_its_own_class(kind: str, tmp_path: Path) -> None:
    model_type, entries = KINDS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **entries)
    stock = getattr(transformers, kind)(config).eval()
    stock.save_pretrained(tmp_path)
    model, tokenizer = load(tmp_path, quiet=True)
    assert type(model) is type(stock) and tokenizer is None and not model.training
    state = model.state_dict()
    assert all(torch.equal(state[key], weight) for key, weight in stock.state_dict().items())


def test_a_model_without_a_class_is_a_decoder_if_it_can_be(copied: Path) -> None:
    edit(copied, architectures=None)
    assert type(load(copied, quiet=True)[0]).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float16, "float64"])
def test_any_dtype_of_one_file(llama: Path, dtype: Any) -> None:
    model, _ = load(llama, dtype=dtype, quiet=True)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_weights_are_read_once_and_kept_once(llama: Path, monkeypatch) -> None:
    read: list[str] = []
    stock = transformers.modeling_utils.safe_open

    def counted(file: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(str(file))
        return stock(file, *args, **kwargs)

    monkeypatch.setattr(transformers.modeling_utils, "safe_open", counted)
    before = {id(p) for p in tensors()}
    model, _ = load(llama, dtype="float32", quiet=True)
    assert len(read) == 1
    new = {p.data_ptr(): p.nbytes for p in tensors() if id(p) not in before}
    held = sum(new.values())
    own = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert held < 1.1 * own


def tensors() -> list[torch.Tensor]:
    import gc

    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


def test_it_says_in_one_line_what_it_chose(llama: Path, capsys) -> None:
    load(llama, dtype="float32", device="cpu")
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "on cpu in float32 (as requested)" in err and str(llama) in err
    load(llama, dtype="float32", quiet=True)
    assert capsys.readouterr() == ("", "")


def test_transformers_speaks_again_afterwards(llama: Path, tmp_path: Path) -> None:
    level, bars = get_verbosity(), is_progress_bar_enabled()
    logging.set_verbosity_info()
    try:
        load(llama, quiet=True)
        assert get_verbosity() == transformers.logging.INFO
        said(tmp_path / "nothing", quiet=True)
        assert get_verbosity() == transformers.logging.INFO
        assert is_progress_bar_enabled() == bars
    finally:
        logging.set_verbosity(level)


def test_what_is_no_checkpoint(tmp_path: Path, llama: Path) -> None:
    assert "no file or folder" in said(tmp_path / "nothing")
    assert "no file or folder" in said("model.gguf")
    assert "no config.json" in said(tmp_path)
    (tmp_path / "model.Q4.gguf").write_bytes(b"")
    assert "model.Q4.gguf" in said(tmp_path)
    assert "cut short" in said(tmp_path / "model.Q4.gguf")
    (tmp_path / "notes.txt").write_text("no model")
    assert "is no model" in said(tmp_path / "notes.txt")
    assert "give the folder" in said(llama / "model.safetensors")
    assert "HF_HUB_OFFLINE" in said("nobody/nothing")
    assert "revision v2" in said("nobody/nothing", revision="v2")
    assert "leave it out" in said(llama, revision="v2")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter" in said(tmp_path)


def test_a_name_on_the_hub_comes_from_its_cache(llama: Path, tmp_path: Path, monkeypatch) -> None:
    commit, repository = "0123456789abcdef" * 2 + "01234567", tmp_path / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text(commit)
    shutil.copytree(ASSETS / "tiny-rope", repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for revision in (None, "v1", commit):
        model, tokenizer = load("owner/tiny", revision=revision, quiet=True)
        assert type(model).__name__ == "LlamaForCausalLM" and len(tokenizer) == 256
    assert "revision v2" in said("owner/tiny", revision="v2")
    for file in (repository / "snapshots" / commit).glob("tokenizer*"):
        file.unlink()
    assert load("owner/tiny", quiet=True)[1] is None
    (repository / "snapshots" / commit / "model.safetensors").unlink()
    assert "weights" in said("owner/tiny")


def test_what_is_no_device_and_no_dtype(llama: Path) -> None:
    assert "no device" in said(llama, device="abacus")
    assert "CUDA" in said(llama, device="cuda:99")
    assert "no dtype" in said(llama, dtype="float31")
    assert "no dtype" in said(llama, dtype=torch.int8)


def edit(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def spoil_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff"])
def test_an_unreadable_configuration(copied: Path, text: str) -> None:
    (copied / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in said(copied)


@pytest.mark.parametrize(
    "entries, answer",
    [
        ({"model_type": "telepathy"}, "'telepathy'"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 128}, "belong together"),
        ({"vocab_size": 98}, "(97, 64), but should be (98, 64)"),
        ({"num_hidden_layers": 5}, "would be random"),
        ({"num_hidden_layers": 3}, "layers would be left out"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "curly", "rope_theta": 1e4}}, "'curly'"),
        ({"longitude": {"scheme": 3}}, "no scheme"),
        ({"auto_map": {"AutoConfig": "c.C"}, "model_type": "own"}, "trust_remote_code=True"),
        (
            {"auto_map": {"AutoModelForCausalLM": "m.M"}, "architectures": ["M"]},
            "trust_remote_code=True",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.strip("'"),
)
def test_a_configuration_that_lies(copied: Path, entries: dict[str, Any], answer: str) -> None:
    edit(copied, **entries)
    assert answer in said(copied, quiet=True)


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_safetensors_cut_short(copied: Path, share: float) -> None:
    file = copied / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    assert "cut short" in said(copied)


def test_weights_that_are_not_there(copied: Path) -> None:
    spoil_weights(copied, lambda w: w.__delitem__("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight is missing" in said(copied)
    (copied / "model.safetensors").unlink()
    assert "weights" in said(copied)


def test_headers_that_lie(copied: Path) -> None:
    file = copied / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 2**40) + whole[8:])
    assert "damaged" in said(copied)


def test_a_broken_tokenizer(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{")
    assert "tokenizer" in said(copied)


def test_code_of_its_own_runs_only_when_asked(copied: Path) -> None:
    (copied / "m.py").write_text(
        "from transformers import LlamaForCausalLM\nclass M(LlamaForCausalLM): pass\n"
    )
    edit(copied, auto_map={"AutoModelForCausalLM": "m.M"}, architectures=["M"])
    said(copied)
    assert not any(name.endswith(".m") and "llama" in name for name in sys.modules)
    model, _ = load(copied, trust_remote_code=True, quiet=True)
    assert type(model).__name__ == "M"


def test_a_window_that_no_one_passes_on(tmp_path: Path) -> None:
    """The real world's shape of a folder: sharded, with an index."""
    model = decoder("mistral")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again, _ = load(tmp_path, quiet=True)
    ids = torch.arange(40)[None] % 97
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert again.config.sliding_window == config_of("mistral").sliding_window


def test_a_hub_that_is_not_reached_is_asked_once(tmp_path: Path, monkeypatch) -> None:
    """Not five times more, with growing pauses, as the Hub's client does by itself."""
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"  # nobody listens there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    begun = time.monotonic()
    assert "the Hub can't be reached" in said("nobody/nothing")
    assert time.monotonic() - begun < 5
