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

from longitude.export.effective.value import Effective as Effective
