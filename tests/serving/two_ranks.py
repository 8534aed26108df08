"""A program: an engine of two processes that share the heads gives what one model gives."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(folder: Path) -> None:
    from tests.serving.engines import check, generate, saved, tokens

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    from vllm import LLM

    text = "alibi_interpolated(4)"  # whose slopes differ by head
    given = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "seed": 0}
    given |= {"additional_config": {"longitude": {"scheme": text, "to": 192}}}
    llm = LLM(str(saved("bloom", folder)), tensor_parallel_size=2, **given)
    check("bloom", text, generate(llm, [tokens(n, n) for n in (150, 20)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
