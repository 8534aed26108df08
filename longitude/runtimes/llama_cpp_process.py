"""llama.cpp's log-probabilities of the next token, as a separate program.

    python llama_cpp_process.py < {"path": …, "ids": […], "lengths": […], "top": 20, "drawn": 64, …}

A separate process isolates the caller from llama.cpp's output and aborts. It imports nothing but
xllamacpp, which is llama.cpp's server as a Python module. Keys and values are cached in float32, so
that only the file can cause a difference. `drawn` is the token that it generates; the
log-probabilities do not depend on it. The last line of its output is one list of pairs (token,
log-probability) per length.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def answers(question: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """Return the most likely tokens after the first n ids, for each length n."""
    xllamacpp: Any = import_module("xllamacpp")  # its types are created when it is imported
    params = xllamacpp.CommonParams()
    params.model.path = question["path"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = max(question["lengths"]) + 8, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = question["threads"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = params.ctx_shift = False
    server = xllamacpp.Server(params)
    results = []
    for length in sorted(question["lengths"]):  # each extends the one before
        answer = server.handle_completions(
            {
                "prompt": question["ids"][:length],
                "max_tokens": 1,
                "n_probs": question["top"],
                "temperature": 0,
                "cache_prompt": True,
                # fixed: after an end token or part of a character there are no probabilities
                "logit_bias": [[question["drawn"], 1e4]],
            }
        )
        if "choices" not in answer:
            raise RuntimeError(f"{length} tokens: {answer}")
        first = answer["choices"][0]["logprobs"]["content"][0]
        results.append([(token["id"], token["logprob"]) for token in first["top_logprobs"]])
    return results


if __name__ == "__main__":
    print("\n" + json.dumps(answers(json.load(sys.stdin))), flush=True)
