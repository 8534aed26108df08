"""llama.cpp asked for the next token's log-probabilities: a program of its own.

    python llama_cpp.py < {"file": …, "ids": […], "lengths": […], "top": 20, "drawn": 64, …}

It runs apart from the library, so that what llama.cpp prints and where it aborts stay outside, and
it imports nothing but xllamacpp, which is llama.cpp's server as a Python module. Keys and values
are kept in float32: what differs then is the file's doing. `drawn` is the token that it writes,
which the log-probabilities don't depend on. The last line of its output is one list of pairs
(token, log-probability) for each length.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def answers(asked: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """For each length the likeliest tokens behind the first so many ids."""
    server = _server(asked["file"], max(asked["lengths"]) + 8, asked["threads"])
    found = []
    for length in sorted(asked["lengths"]):  # each goes on from the one before
        answer = server.handle_completions(
            {
                "prompt": asked["ids"][:length],
                "max_tokens": 1,
                "n_probs": asked["top"],
                "temperature": 0,
                "cache_prompt": True,
                # whatever is drawn: behind an end, or half a letter, it tells no probabilities
                "logit_bias": [[asked["drawn"], 1e4]],
            }
        )
        if "choices" not in answer:
            raise RuntimeError(f"{length} tokens: {answer}")
        found.append(_likeliest(answer))
    return found


def _likeliest(answer: dict[str, Any]) -> list[tuple[int, float]]:
    first = answer["choices"][0]["logprobs"]["content"][0]
    return [(token["id"], token["logprob"]) for token in first["top_logprobs"]]


def _server(file: str, room: int, threads: int) -> Any:
    xllamacpp: Any = import_module("xllamacpp")  # its types are made as it loads
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.n_gpu_layers = room, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = params.ctx_shift = False
    return xllamacpp.Server(params)


if __name__ == "__main__":
    print("\n" + json.dumps(answers(json.load(sys.stdin))), flush=True)
