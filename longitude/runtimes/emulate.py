"""What each runtime really computes: its own code's formulas over the settings it is given.

`effective(runtime, config, version)` takes the settings as the runtime gets them:

- of runtimes that read a checkpoint's folder, what its config.json holds; under
  "tokenizer_config.json" what that file holds, if it matters; and what is said at the start under
  its own name: "--hf-overrides" (a dictionary) and "--max-model-len" of vLLM,
  "--json-model-override-args" and "--context-length" of SGLang, "model_kwargs" and "max_seq_len" of
  TensorRT-LLM, "model_config" of mlx-lm, "from_pretrained" (keywords) of transformers,
  "overrides_of_model_config" and "sequence_len" of axolotl;
- of llama.cpp, gguf and ollama the keys of a GGUF file by their names there
  ("llama.rope.freq_base", "general.architecture"), its rotary tensors by theirs
  ("rope_freqs.weight": a list), flags ("-c", "--rope-scaling", "--yarn-beta-fast", with numbers as
  numbers) and the parameters of a Modelfile ("num_ctx");
  without "general.architecture", a config.json as convert_hf_to_gguf would write it;
- of torchtitan the fields of its RoPE.Config ("theta", "scaling", …), "dim" and "max_seq_len".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longitude.core.validate import UserError, shown
from longitude.runtimes import (
    exllama,
    llama_cpp,
    mlx,
    sglang,
    tensorrt_llm,
    torchtitan,
    transformers,
    vllm,
)
from longitude.runtimes.effective import Effective as Effective
from longitude.runtimes.effective import Refused
from longitude.runtimes.llama_cpp import explained, gguf_keys

BROKEN = (TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError, KeyError)
Computes = Callable[[Mapping[str, Any], str | None], Effective]


def effective(runtime: str, config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What a runtime's own code computes from these settings; the newest version if none is named.

    Where it would not start, there are no frequencies, and the last trap says why.
    """
    if runtime not in COMPUTES:
        known = ", ".join(COMPUTES)
        raise UserError(f"no runtime is known as {shown(runtime)}: there are {known}.")
    try:
        return COMPUTES[runtime](config, version)
    except Refused as refused:
        return Effective((), 0.0, 0, (str(refused),))
    except UserError:
        raise
    except BROKEN:  # a list where a number belongs: the runtime's formulas stop there as ours do
        return Effective((), 0.0, 0, ("out of range",))


def is_gguf(config: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a GGUF file rather than a config.json."""
    return "general.architecture" in config


def _transformers(config: Mapping[str, Any], version: str | None) -> Effective:
    """transformers; of a GGUF file it takes the base and leaves the rest."""
    if not is_gguf(config):
        return transformers.effective(config, version)
    arch = config["general.architecture"]
    kept = {k: v for k, v in config.items() if ".rope.scal" not in k and not k.startswith("rope_")}
    found = llama_cpp.effective({k: v for k, v in kept.items() if not k.startswith("-")})
    dropped = ["scaling dropped"] if len(kept) < len(config) else []
    begun = config.get("tokenizer.ggml.add_bos_token") or str(arch).startswith("gemma")
    return Effective(
        found.inv_freq, found.attention, found.length, (*dropped, *["no BOS"] * bool(begun))
    )


def _llama_cpp(config: Mapping[str, Any], version: str | None) -> Effective:
    if is_gguf(config):
        return llama_cpp.effective(config, version)
    return explained(config, llama_cpp.effective(gguf_keys(config), version))


def _ollama(config: Mapping[str, Any], version: str | None) -> Effective:
    """Ollama, which runs llama.cpp without flags; a context that no Modelfile names is its own
    choice, by the memory it finds."""
    found = _llama_cpp({k: v for k, v in config.items() if not k.startswith("-")}, None)
    silent = [] if "num_ctx" in config else ["context of its own"]
    return Effective(found.inv_freq, found.attention, found.length, (*found.traps, *silent))


def _axolotl(config: Mapping[str, Any], version: str | None) -> Effective:
    """axolotl, which sets entries on a configuration of transformers 5."""
    told = config.get("overrides_of_model_config") or {}
    if "rope_scaling" in config.get("axolotl", {}):
        raise Refused("unknown type")
    length = config.get("sequence_len")
    return transformers.made(transformers.version5(config, told), length=length)


COMPUTES: dict[str, Computes] = {
    "transformers": _transformers,
    "vllm": vllm.effective,
    "sglang": sglang.effective,
    "llama.cpp": _llama_cpp,
    "gguf": _llama_cpp,
    "ollama": _ollama,
    "mlx": mlx.effective,
    "exllama": exllama.effective,
    "tensorrt-llm": tensorrt_llm.effective,
    "axolotl": _axolotl,
    "torchtitan": torchtitan.effective,
}
