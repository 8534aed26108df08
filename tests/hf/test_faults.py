"""The table of faults: each finds its own, a sound file has none, and the traps are real."""

import contextlib
import random
from copy import deepcopy
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longitude import UserError
from longitude.hf.faults import RULES, check, faults
from longitude.hf.rope_config import code_reads, read, ropes
from longitude.parts import Rope, Yarn
from tests.hf.real_configs import FORMS, ORIGINAL

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256}
THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64, **THETA}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, ORIGINAL: 64, **THETA}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, ORIGINAL: 64, **LISTS, **THETA}


def five(parameters: Any, **entries: Any) -> dict[str, Any]:
    """A Llama's config.json as transformers 5 writes it."""
    return {"model_type": "llama", **SIZES, "rope_parameters": parameters, **entries}


def four(scaling: Any, **entries: Any) -> dict[str, Any]:
    """The same as transformers 4 wrote it."""
    return {"model_type": "llama", **SIZES, "rope_scaling": scaling, **THETA, **entries}


def without(d: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in d.items() if key not in keys}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("no count", five(THETA, num_attention_heads=0), "num_attention_heads is 0, but"),
    ("no count", five(THETA, num_key_value_heads=0), "num_key_value_heads is 0, but"),
    ("no count", five(THETA, max_position_embeddings="256"), "max_position_embeddings is '256'"),
    ("no count", five(THETA, model_type="mistral", sliding_window="64"), "sliding_window is '64'"),
    (
        "uneven heads",
        five(THETA, head_dim=32, num_attention_heads=5, num_key_value_heads=3),
        "num_attention_heads is 5 and num_key_value_heads 3",
    ),
    (
        "uneven heads",
        five(
            {**THETA, "partial_rotary_factor": 0.25},
            model_type="gpt_neox",
            hidden_size=98,
            num_attention_heads=4,
        ),
        "hidden_size is 98 and num_attention_heads 4",
    ),
    ("not a dictionary", five("yarn"), "'yarn'"),
    ("not a dictionary", four(["linear", 4]), "rope_scaling should be"),
    ("two dictionaries", five(YARN, rope_scaling={**YARN, "factor": 2.0}), "on factor, and"),
    (
        "two dictionaries",
        five({"rope_type": "default", "rope_theta": 5e5}, rope_scaling=without(YARN, "rope_theta")),
        "factor, original_max_position_embeddings, rope_theta, rope_type",
    ),
    ("two types", five({**YARN, "type": "linear"}), "'linear' and 'yarn'"),
    ("two types", four({"type": "dynamic", "rope_type": "linear", "factor": 2.0}), "rope_scaling"),
    ("unknown type", five({**THETA, "rope_type": "wavelets"}), "'wavelets'"),
    ("unknown type", four({"type": "su", **LISTS, ORIGINAL: 64}), "'su'"),
    ("unknown type", four({"type": "mrope", "mrope_section": [4, 6, 6]}), "'mrope'"),
    ("unknown key", five({**THETA, "rope_type": "linear", "factor": 2.0, "facter": 2}), "facter"),
    ("unknown key", five({**THETA, "alpha": 100.0}), "alpha"),
    ("unknown key", without(five({**THETA, "short_mscale": 1.0}), "model_type"), "short_mscale"),
    ("no number", five({**YARN, "factor": "4"}), "factor is '4'"),
    ("no number", five({**YARN, "beta_fast": True}), "beta_fast is True"),
    ("missing key", five({"rope_type": "linear", **THETA}), "no factor"),
    ("missing key", four({"type": "dynamic"}), "no factor"),
    ("missing key", five(without(YARN, "factor")), "no factor"),
    ("missing key", five(without(LLAMA3, "high_freq_factor")), "no high_freq_factor"),
    ("missing key", five(without(LONGROPE, "long_factor")), "no long_factor"),
    ("no theta", five({"rope_type": "linear", "factor": 2.0}), "only factor, rope_type"),
    (
        "no theta",
        five({"full_attention": {"rope_type": "default"}, "sliding_attention": THETA}),
        "rope_parameters.full_attention",
    ),
    ("two thetas", five(THETA, rope_theta=500000.0), "500000.0 and 10000.0"),
    ("no original", five(without(YARN, ORIGINAL), max_position_embeddings=1024), "1024"),
    ("no original", four({"type": "llama3", **without(LLAMA3, ORIGINAL, "rope_type")}), "llama3"),
    ("no original", five({"full_attention": without(LONGROPE, ORIGINAL)}), "longrope"),
    ("no original", five({"full_attention": without(YARN, ORIGINAL)}, **{ORIGINAL: 64}), "yarn"),
    ("two originals", five(YARN, **{ORIGINAL: 128}), "128 and 64"),
    ("out of range", four({"type": "linear", "factor": 0.5}), "factor is 0.5"),
    ("out of range", five({"rope_theta": 1.0}), "rope_theta is 1.0"),
    ("out of range", five({**YARN, "attention_factor": -1.0}), "attention_factor is -1.0"),
    ("out of range", five({**YARN, ORIGINAL: 0}), f"{ORIGINAL} is 0"),
    (
        "out of range",
        five({**THETA, "partial_rotary_factor": 1.5}, model_type="phi"),
        "partial_rotary_factor is 1.5",
    ),
    ("no number", five({"rope_theta": float("nan")}), "rope_theta is nan"),
    ("bounds crossed", five({**LLAMA3, "low_freq_factor": 5.0}), "low_freq_factor=5.0"),
    ("bounds crossed", five({**YARN, "beta_slow": 40}), "beta_slow=40 and beta_fast=32"),
    ("wrong lists", five({**LONGROPE, "short_factor": [1.0] * 15}), "15, 16 for 16"),
    ("wrong lists", five(LONGROPE, head_dim=64), "16, 16 for 32"),
    ("wrong lists", five({**LONGROPE, "long_factor": 2.0}), "lists of numbers"),
    ("odd head", five(THETA, head_dim=33), "33 of 33"),
    ("odd head", five({**THETA, "partial_rotary_factor": 0.1}, model_type="phi"), "3 of 32"),
    ("partial ignored", five({**THETA, "partial_rotary_factor": 0.5}), "0.5"),
    ("partial ignored", four(None, partial_rotary_factor=0.25), "0.25"),
    ("truncate ignored", five({"full_attention": {**YARN, "truncate": False}}), "False"),
    ("theta by default", without(four({"type": "linear", "factor": 2.0}), "rope_theta"), "factor"),
    ("idle key", five({**THETA, "factor": 2.0}), "factor, which type default"),
    ("idle key", four({"type": "linear", "factor": 2.0, ORIGINAL: 64}), ORIGINAL),
    ("idle key", four({"type": "linear", "factor": 2.0, "finetuned": True}), "finetuned"),
    ("mscale alone", five({**YARN, "mscale": 0.7}), "mscale alone"),
    ("mscale alone", five({**YARN, "mscale": 0.0, "mscale_all_dim": 1.0}), "mscale_all_dim"),
    ("other ratio", five({**YARN, "factor": 8.0}), "8.0 for 256 / 64"),
    ("not extended", five({**LLAMA3, ORIGINAL: 256}), "× factor"),
    ("not extended", five({**YARN, ORIGINAL: 256}), "× factor (1024, not 256)"),
]


@pytest.mark.parametrize(("name", "raw", "shown"), WRONG)
def test_a_fault_is_found_and_told_in_one_sentence(
    name: str, raw: dict[str, Any], shown: str
) -> None:
    found = {fault.name: fault for fault in faults(raw)}
    assert name in found
    sentence = found[name].sentence
    assert shown in sentence
    assert sentence.endswith(".") and ": " in sentence and ". " not in sentence
    assert "{" not in sentence.replace(str(raw.get("rope_parameters")), "")


@pytest.mark.parametrize(("name", "raw", "shown"), WRONG)
def test_a_serious_fault_is_raised_and_the_others_are_not(
    name: str, raw: dict[str, Any], shown: str
) -> None:
    serious = {row.name: row.serious for row in RULES}[name]
    if serious:
        with pytest.raises(UserError):
            check(raw)
    else:
        check(raw)
        assert read(raw)


def test_every_row_of_the_table_is_tested() -> None:
    assert {name for name, _, _ in WRONG} == {row.name for row in RULES}


def test_most_wrong_files_have_that_one_serious_fault() -> None:
    for name, raw, _ in WRONG:
        serious = [fault.name for fault in faults(raw) if fault.serious]
        if name not in ("no number", "out of range") and serious:
            assert serious == [name]


@pytest.mark.parametrize("name", FORMS)
def test_a_sound_file_has_no_fault(name: str) -> None:
    raw, _ = FORMS[name]
    known = ["theta by default"] if name == "vicuna-7b-v1.5-16k, version 4" else []
    # YaRN of factor 4, as its card advises, beside an unchanged max_position_embeddings
    known = ["not extended"] if name.startswith("Qwen2.5-7B") else known
    assert [fault.name for fault in faults(raw)] == known


def test_the_same_rotation_twice_is_no_fault() -> None:
    older = {**without(YARN, "rope_type", "rope_theta"), "type": "yarn"}
    assert not faults(five(YARN, rope_scaling=older, rope_theta=10000.0))


def test_a_file_without_rotation_has_no_fault() -> None:
    assert not faults({"model_type": "gpt2", "n_embd": 64})
    assert not faults(four(None)) and not faults(five(None))


def test_the_configuration_of_the_text_inside_is_judged() -> None:
    inside = five({"rope_type": "linear", "factor": 2.0})
    [fault] = faults({"model_type": "gemma3", "text_config": inside})
    assert fault.serious and "text_config.rope_parameters has no rope_theta" in fault.sentence


def test_a_share_of_a_proportional_layer_is_its_own() -> None:
    share = {"rope_type": "proportional", "partial_rotary_factor": 0.25, **THETA}
    assert not faults(five(share))


def test_entries_that_the_model_itself_reads_are_known() -> None:
    scaling = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    assert not faults(four(scaling, model_type="hunyuan_v1_dense"))
    moe = {**LONGROPE, "short_mscale": 1.25, "long_mscale": 1.25}
    assert not faults(five(moe, model_type="phimoe"))


def test_whether_a_model_heeds_an_entry_stands_in_its_code() -> None:
    heeding = {kind: type(AutoConfig.for_model(kind)) for kind in ("llama", "phi", "gpt_neox")}
    found = {kind: code_reads(c, "partial_rotary_factor") for kind, c in heeding.items()}
    assert found == {"llama": False, "phi": True, "gpt_neox": True}
    assert code_reads(Rope, "anything")  # no code beside it: nothing is ruled out


GARBAGE = [None, True, "x", "", [], [1], {}, {"a": 1}, -1, 0, 0.5, 1e400, 10**400, float("nan")]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_file_holds_it_is_judged_or_refused_but_never_breaks(seed: int) -> None:
    rng = random.Random(seed)
    sound = [raw for raw, _ in FORMS.values()] + [raw for _, raw, _ in WRONG]
    for _ in range(60):
        raw = deepcopy(rng.choice(sound))
        for _ in range(rng.randint(1, 3)):
            inner = raw.get(rng.choice(["rope_parameters", "rope_scaling"]))
            at = inner if isinstance(inner, dict) and inner and rng.random() < 0.7 else raw
            at[rng.choice(list(at))] = deepcopy(rng.choice(GARBAGE))
        assert isinstance(faults(raw), list)
        with contextlib.suppress(UserError):
            read(raw)


def effective(raw: dict[str, Any]) -> Rope:
    """What transformers turns by, given a file that is not judged."""
    config: Any = AutoConfig.for_model(**deepcopy(raw))  # it writes into what it is given
    LlamaRotaryEmbedding(config)
    found = ropes(config)[None]
    assert found
    return found


def test_the_traps_are_real() -> None:
    lost = five({"rope_type": "default"})
    assert effective(lost) == Rope(10000)
    dropped = five({"rope_theta": 5e5}, rope_scaling=without(YARN, "rope_theta"))
    assert effective(dropped) == Rope(10000, frequencies=Yarn(4, original=64))
    raised = five(without(YARN, ORIGINAL), max_position_embeddings=1024)
    assert effective(raised) == Rope(frequencies=Yarn(4, original=1024))
    torn = five({**YARN, "type": "linear"})
    assert effective(torn) == Rope(frequencies=Yarn(4, original=64))
    ignored = five({"rope_theta": 10000.0}, rope_theta=5e5)
    assert effective(ignored) == Rope(10000)
    whole = five({**THETA, "rope_type": "default", "partial_rotary_factor": 0.5})
    assert effective(whole) == Rope(fraction=1)
    for raw in (lost, dropped, raised, torn, ignored, whole):
        with pytest.raises(UserError):
            check(raw)
