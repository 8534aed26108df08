"""Stock transformers loads what the lab trains and computes the same logits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from longitude import UserError, parse
from longitude.training import to_hf
from longitude.training.lab.model import Decoder, DecoderConfig
from longitude.training.to_hf import ARCHITECTURES, Kind, stock_model, write_checkpoint

LENGTH = 32
STOCK: dict[str, tuple[str, Kind]] = {
    "rope()": ("llama", "llama"),
    "rope(base=500)": ("llama", "llama"),
    "layers(rope(), rope())": ("llama", "llama"),
    "pose(128) + rope()": ("llama", "llama"),
    "rope(remap=inverse_leaky(40, 2))": ("llama", "llama"),  # read as plain RoPE
    "rope(frequencies=linear(2))": ("llama", "llama"),
    "rope(base=500, frequencies=llama3(8, original=16))": ("llama", "llama"),
    "rope(base=500, frequencies=yarn(4, original=8, attention_factor=2))": ("llama", "llama"),
    f"learned({LENGTH})": ("gpt", "gpt2"),
    "pose(48) + learned(48)": ("gpt", "gpt2"),
    "alibi()": ("gpt", "bloom"),
    f"equal_mean({LENGTH}) + alibi()": ("gpt", "bloom"),
}


def shape(scheme: str, heads: int = 6, **given: Any) -> DecoderConfig:
    block, kind = STOCK[scheme]
    dim = 8 * heads
    hidden = 4 * dim if kind == "bloom" else 40
    numbers = {"layers": 2, "dim": dim, "heads": heads, "hidden": hidden, **given}
    return DecoderConfig(scheme, LENGTH, **numbers, block=block, embed_norm=kind == "bloom")


def trained(of: DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder whose weights are large enough for every one of them to matter."""
    torch.manual_seed(seed)
    model = Decoder(of)
    with torch.no_grad():
        for w in model.parameters():
            if w.dim() > 1:
                w.copy_(torch.randn_like(w) * 1.3 * w.shape[-1] ** -0.5)
            else:
                w.add_(0.3 * torch.randn_like(w))
    return model.eval()


def write(folder: Path, model: Decoder, dtype: str = "float32", **given: Any) -> None:
    write_checkpoint(folder, replace(model.config, **given), model.state_dict(), dtype)


def load(folder: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, loading = loaded
    assert not any(loading.values()), loading
    return model.eval()


def tokens(n: int = LENGTH) -> Tensor:
    """Bytes of every kind, the one that pads among them."""
    drawn = torch.randint(256, (2, n), generator=torch.Generator().manual_seed(1))
    drawn[0, n // 2] = 0
    return drawn


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(ids)
    return getattr(out, "logits", out)


@pytest.mark.parametrize("scheme", STOCK)
def test_logits_are_the_same(scheme: str, tmp_path: Path, heard: list[str]) -> None:
    ours = trained(shape(scheme))
    write(tmp_path / "home", ours)
    theirs = load(tmp_path / "home")
    assert theirs.config.model_type == STOCK[scheme][1]
    torch.testing.assert_close(logits(theirs, tokens()), logits(ours, tokens()), rtol=0, atol=2e-5)
    assert not heard


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("scheme", ["rope()", f"learned({LENGTH})", "alibi()"])
def test_other_shapes(scheme: str, heads: int, tmp_path: Path) -> None:
    ours = trained(shape(scheme, heads, layers=heads), seed=heads)
    write(tmp_path, ours)
    torch.testing.assert_close(
        logits(load(tmp_path), tokens()), logits(ours, tokens()), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("scheme", ["rope()", f"learned({LENGTH})", "alibi()"])
def test_norms_of_small_vectors(scheme: str, tmp_path: Path) -> None:
    ours = trained(shape(scheme, layers=1))
    with torch.no_grad():  # so small that what the norms add to the variance counts
        for name, w in ours.named_parameters():
            w.mul_(0.01 if name.endswith(("tokens.weight", "table", "out.weight")) else 1)
    write(tmp_path, ours)
    expected = logits(ours, tokens())
    difference = logits(load(tmp_path), tokens()) - expected
    assert difference.abs().max() < 2e-5 * expected.std()


@pytest.mark.parametrize("scheme", ["rope()", f"learned({LENGTH})", "alibi()"])
def test_generation_goes_on_as_ours_does(scheme: str, tmp_path: Path, heard: list[str]) -> None:
    ours = trained(shape(scheme))
    write(tmp_path, ours)
    theirs, tokenizer = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    start = tokenizer("Where is it?", return_tensors="pt")
    made = theirs.generate(**start, max_new_tokens=5, do_sample=False)[0]
    ids = start["input_ids"]
    for _ in range(5):
        ids = torch.cat([ids, logits(ours, ids)[:, -1:].argmax(-1)], 1)
    assert made.tolist() == ids[0].tolist()
    assert not heard


@pytest.mark.parametrize("scheme", ["rope()", f"learned({LENGTH})", "alibi()"])
def test_bfloat16_rounds_and_says_so(scheme: str, tmp_path: Path) -> None:
    ours = trained(shape(scheme))
    write(tmp_path, ours, dtype="bfloat16")
    theirs = load(tmp_path)
    assert theirs.dtype == torch.bfloat16
    rounded = ours.to(torch.bfloat16).float()
    torch.testing.assert_close(
        logits(theirs.float(), tokens()), logits(rounded, tokens()), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize(
    ("scheme", "hidden"), [("rope()", 512), (f"learned({LENGTH})", 768), ("alibi()", 768)]
)
def test_the_tiny_checkpoints_stay_below_5_mb(scheme: str, hidden: int, tmp_path: Path) -> None:
    of = shape(scheme, dim=192, layers=5, hidden=hidden)
    write(tmp_path, Decoder(of), dtype="bfloat16")
    assert 4e6 < sum(f.stat().st_size for f in tmp_path.iterdir()) <= 5e6


def test_what_the_files_say(tmp_path: Path) -> None:
    yarn = "rope(base=500, frequencies=yarn(4, original=8, attention_factor=2))"
    write(tmp_path, trained(shape(yarn)))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500
    assert config["max_position_embeddings"] == LENGTH
    assert config["tie_word_embeddings"] is True
    spoken = GenerationConfig.from_pretrained(tmp_path)
    assert (spoken.bos_token_id, spoken.eos_token_id, spoken.pad_token_id) == (0, 0, 0)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == LENGTH


def test_the_table_of_positions_may_be_longer_than_the_window(tmp_path: Path) -> None:
    ours = trained(shape("pose(48) + learned(48)"))
    write(tmp_path, ours)
    theirs, far = load(tmp_path), tokens(48)
    assert theirs.config.n_positions == 48
    torch.testing.assert_close(logits(theirs, far), logits(ours, far), rtol=0, atol=2e-5)


class Killed(BaseException):
    """What no `except Exception` stops."""


@pytest.mark.parametrize("step", ["save_file", "write_json"])
def test_a_kill_leaves_the_checkpoint_that_was_there(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first, second = tmp_path / "home", trained(shape("rope()")), trained(shape("rope()"), 1)
    write(folder, first)
    with monkeypatch.context() as killed, pytest.raises(Killed):
        killed.setattr(to_hf, step, stopped)
        write(folder, second)
    assert torch.equal(load(folder).lm_head.weight, first.tokens.weight)
    write(folder, second)
    assert torch.equal(load(folder).lm_head.weight, second.tokens.weight)
    assert [f.name for f in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize("before", [False, True], ids=["new", "again"])
def test_a_kill_while_files_move_leaves_no_folder_that_looks_whole(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, moves, move = tmp_path / "home", [], Path.replace

    def some(file: Path, target: Path) -> Path:
        moves.append(target.name)
        return stopped() if len(moves) == 5 else move(file, target)

    if before:
        write(folder, trained(shape("rope(base=500)")))
    with monkeypatch.context() as killed, pytest.raises(Killed):
        killed.setattr(Path, "replace", some)
        write(folder, trained(shape("rope()")))
    assert moves[-1] == "config.json"
    assert {f.name for f in folder.iterdir()} == {*moves} - {"config.json"}
    write(folder, trained(shape("rope()")))
    load(folder)


def stopped(*_: Any, **__: Any) -> Any:
    raise Killed


def test_random_numbers_drawn_elsewhere_stay_the_same(tmp_path: Path) -> None:
    model = trained(shape("rope()"))
    before = torch.get_rng_state()
    write(tmp_path, model)
    assert torch.equal(torch.get_rng_state(), before)


def refused(tmp_path: Path, scheme: str, match: str, **given: Any) -> None:
    model = trained(shape(scheme))
    with pytest.raises(UserError, match=match):
        write(tmp_path / "home", model, **given)
    assert not list(tmp_path.iterdir())


def test_a_bloom_of_another_width_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "alibi()", "four times as wide as the model, but got 99", hidden=99)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "rope()", r"embed_tokens.weight should be \(256, 96\), but", dim=96)
    refused(tmp_path, "rope()", "should be .*, but is missing", layers=3)
    refused(tmp_path, "rope()", "layers.1.* should be left out, but is", layers=1)


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "rope()", "--weights is float32 or bfloat16, but got 'int8'", dtype="int8")


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(Path(), trained(shape("rope()")))
    load(tmp_path / "here")
    assert [f.name for f in tmp_path.iterdir()] == ["here"]


def test_weights_that_a_home_has_no_place_for_are_refused(tmp_path: Path) -> None:
    of = shape("rope()")
    weights = dict(trained(of).state_dict()) | {"blocks.0.attend.at.weights.r1": torch.ones(6)}
    with pytest.raises(
        UserError, match=r"a Llama has no place for the weight blocks\.0\.attend\.at"
    ):
        write_checkpoint(tmp_path / "home", of, weights)


@pytest.mark.parametrize(
    ("scheme", "block", "match"),
    [
        ("alibi()", "llama", "no equivalent .* with the llama block"),
        ("rope(fraction=0.5)", "llama", "a Llama rotates full heads"),
    ],
)
def test_a_scheme_without_a_stock_model_is_refused(
    scheme: str, block: str, match: str, tmp_path: Path
) -> None:
    config = DecoderConfig(scheme, length=8, layers=1, dim=8, heads=1, hidden=8, block=block)
    with pytest.raises(UserError, match=match):
        write_checkpoint(tmp_path / "home", config, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", STOCK)
def test_a_home_is_told_before_training(scheme: str) -> None:
    block, kind = STOCK[scheme]
    found, sentence = stock_model(parse(scheme), block)
    assert found == kind
    assert sentence.endswith(
        f"trains a {ARCHITECTURES[kind].name}: stock transformers loads the result."
    )
    found, sentence = stock_model(parse(scheme), "gpt" if block == "llama" else "llama")
    assert found is None
    assert f"the {block} block makes it a {ARCHITECTURES[kind].name}." in sentence


@pytest.mark.parametrize("block", ["llama", "gpt"])
@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("causal()", "each alone and causal"),
        ("rope() + bidirectional()", "each alone and causal"),
        ("rope() + window(8)", "each alone and causal"),
        ("rope() + logn(32)", "each alone and causal"),
        ("rope() + alibi()", "each alone and causal"),
        ("rope() + learned(32)", "each alone and causal"),
        ("alibi(steepness=4)", "each alone and causal"),
        ("alibi_interpolated(2)", "each alone and causal"),
        ("learned(32, offset=2)", "each alone and causal"),
        ("sinusoidal()", "each alone and causal"),
        ("t5()", "each alone and causal"),
        ("rope(pairs='adjacent')", "pairs the halves of a head"),
        ("rope(fraction=0.5)", "rotates full heads"),
        ("rope(decay=xpos())", "no name for xpos"),
        ("rope(frequencies=ntk(4))", "no name for ntk"),
        ("rope(frequencies=dynamic_ntk(64, 4))", "dynamic NTK begins at its window"),
        ("layers(rope(), causal())", "layers differ"),
        ("randomized(64) + rope()", "read at the positions of randomized(64)"),
    ],
)
def test_no_home_is_told_in_one_sentence(scheme: str, why: str, block: str) -> None:
    kind, sentence = stock_model(parse(scheme), block)
    assert kind is None
    assert "has no equivalent in stock transformers: " in sentence and why in sentence
    assert sentence.endswith(".") and sentence.count(". ") == 0
