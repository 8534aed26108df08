"""Traps: where a runtime computes something else than its settings seem to say, and the cure.

Each is one row of a table: its name, the numbers that it changes, what happens, what to do. A
runtime's file in `effective` names those that it met. Those that change no number at the longest
input are worth a note alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Number = Literal["frequencies", "attention", "length", "start"]


@dataclass(frozen=True)
class Trap:
    """One way to be misunderstood."""

    name: str
    changes: tuple[Number, ...]  # nothing: a note
    sentence: str
    cure: str


TRAPS: dict[str, Trap] = {}


def _row(name: str, changes: str, sentence: str, cure: str) -> None:
    numbers: list[Number] = []
    for each in changes.split():
        assert each in ("frequencies", "attention", "length", "start")
        numbers.append(each)
    TRAPS[name] = Trap(name, tuple(numbers), sentence, cure)


_row(
    "attention factor ignored",
    "attention",
    "it does not read attention_factor, and takes its own formula's.",
    "write attn_factor = A / (0.1 ln s + 1) for SGLang and vLLM before 0.32, mscale = (A - 1) / "
    "(0.1 ln s) for mlx-lm and TensorRT-LLM, short_mscale and long_mscale for longrope, "
    "attn_factor into the GGUF file.",
)
_row(
    "mscale ignored",
    "attention",
    "it does not read mscale and mscale_all_dim together.",
    "write the attention_factor that they make.",
)
_row(
    "dead attention key",
    "attention",
    "llama.cpp does not read the key yarn_attn_factor, and under YaRN not its flag since b7394.",
    "write rope.scaling.attn_factor = A / (0.1 ln s + 1) into the file.",
)
_row(
    "dead betas",
    "frequencies",
    "llama.cpp does not read yarn_beta_fast and yarn_beta_slow for this architecture.",
    "give the flags --yarn-beta-fast and --yarn-beta-slow, or write a rope_freqs tensor.",
)
_row(
    "tensor not loaded",
    "start",
    "llama.cpp stops at a tensor of divisors that its loader of this architecture does not expect.",
    "use a scheme that has a name there: linear, yarn or another base; two lists need the type "
    "longrope.",
)
_row(
    "factor from lengths",
    "frequencies attention",
    "YaRN's factor is taken from max_position_embeddings / original_max_position_embeddings.",
    "make max_position_embeddings the original length times the factor.",
)
_row(
    "other original",
    "frequencies attention",
    "the original length is not the one that was meant: the maximum or a default takes its place.",
    "write original_max_position_embeddings where this version reads it, or use another version.",
)
_row(
    "whole number",
    "start",
    "linear scaling stops at a factor that is a whole number ('int' object is not iterable).",
    "write it as a float, as 4.0.",
)
_row(
    "no theta",
    "start",
    "the dictionary replaces the one in the file, and its rope_theta is None.",
    "write rope_theta inside the dictionary.",
)
_row(
    "theta dropped",
    "frequencies",
    "the dictionary replaces the one in the file, and without a rope_theta the base is 10000.",
    "write rope_theta inside the dictionary.",
)
_row(
    "theta beside",
    "frequencies",
    "the rope_theta beside the dictionary and the one inside differ, and one of them is not read.",
    "write the same into both.",
)
_row(
    "rope_parameters unread",
    "frequencies attention",
    "it reads rope_theta and rope_scaling, and not rope_parameters.",
    "write both spellings into config.json.",
)
_row(
    "length counted twice",
    "length",
    "the longest input is max_position_embeddings times the factor.",
    "give --max-model-len (vLLM) or --context-length (SGLang).",
)
_row(
    "length past the table",
    "length",
    "the table has original length times factor rows, fewer than max_position_embeddings.",
    "make max_position_embeddings the original length times the factor.",
)
_row(
    "longrope kept short",
    "length frequencies",
    "without --max-model-len vLLM serves a longrope model at its original length alone.",
    "give --max-model-len.",
)
_row(
    "tokenizer's length",
    "length",
    "vLLM takes the tokenizer's model_max_length where it is shorter.",
    "raise model_max_length in tokenizer_config.json.",
)
_row(
    "length refused",
    "start",
    "the length asked for is above the one that it derives from the file, and it stops.",
    "override max_position_embeddings as well.",
)
_row(
    "context cap",
    "length",
    "llama-server gives a slot no more than the file's context_length.",
    "rewrite context_length in the file, or with --override-kv.",
)
_row(
    "truncate ignored",
    "frequencies",
    "it rounds the ends of YaRN's ramp, whatever truncate says.",
    "write longrope with equal lists, or a rope_freqs tensor.",
)
_row(
    "dynamic is static",
    "frequencies length",
    "it has no frequencies that follow the length: one table serves every input.",
    "write a larger rope_theta, fixed for the length you serve.",
)
_row(
    "full layers unscaled",
    "frequencies attention",
    "SGLang turns those layers of Gemma 3 that see everything by their base alone.",
    "serve it by vLLM or transformers.",
)
_row(
    "scaling dropped",
    "frequencies attention",
    "transformers reads the base of a GGUF file and drops its scaling.",
    "open it with longitude, which reads the keys, or use the model's own folder.",
)
_row(
    "temperature left out",
    "attention",
    "torchtitan leaves YaRN's factor on cosine and sine to the model's own code.",
    "fold its square into the softmax scale, or set attention_factor=1 in the scheme.",
)
_row(
    "unknown type",
    "start",
    "it knows no frequencies of this name.",
    "write a larger rope_theta, fixed for the length you serve.",
)
_row(
    "missing key",
    "start",
    "an entry that it needs is not there, or is no number.",
    "write every entry of the type into the dictionary.",
)
_row("out of range", "start", "its numbers make no rotation.", "correct them.")
_row(
    "wrong list",
    "start",
    "there are not as many factors as pairs that turn.",
    "give one factor for each pair.",
)
_row(
    "both types",
    "start",
    "exllamav2 stops where both type and rope_type are given.",
    "keep one of them.",
)
_row(
    "longrope switch",
    "",
    "transformers chooses between its two lists by each input, a server once for all of them.",
    "write equal lists, or serve short and long inputs apart.",
)
_row(
    "decode differs",
    "",
    "the base grows while keys in the cache keep the old one, so decoding differs from reading.",
    "write a larger rope_theta, fixed for the length you serve.",
)
_row(
    "short inputs",
    "",
    "the frequencies are scaled for short inputs too, which may cost there.",
    "measure the model at its original length as well (longitude extend does).",
)
_row(
    "context of its own",
    "",
    "without num_ctx Ollama chooses the context by the memory it finds, 4096 at the least.",
    "write PARAMETER num_ctx into the Modelfile.",
)
_row(
    "no BOS",
    "",
    "transformers' tokenizer of a GGUF file may not begin a text with the BOS token.",
    "check the first token before you measure.",
)
_row(
    "adapter alone",
    "frequencies attention length",
    "peft stores no rotation: given the base and the adapter, it turns by the base's own settings.",
    "merge it with its scheme: longitude export ADAPTER.",
)
_row(
    "other frequencies",
    "frequencies",
    "its frequencies differ.",
    "export the scheme for this runtime.",
)
_row(
    "other attention",
    "attention",
    "its factor on cosine and sine differs.",
    "export the scheme for this runtime.",
)
_row(
    "other length",
    "length",
    "its longest input differs.",
    "say the length where this runtime reads it.",
)
