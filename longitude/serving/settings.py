"""Decide which scheme an engine serves, and whether it can, before any model is loaded.

The scheme is named by `longitude.json` in the model's folder, which `longitude export --for vllm`
writes, by the config.json of a model that was saved under one (`longitude tune`), or by the
engine's arguments:

    --additional-config '{"longitude": {"scheme": "rope(remap=rerope(4096))", "to": 32768}}'

`to` is the longest input, in tokens or as "4x"; `max_model_len` is set to it. `force` accepts a
scheme that contradicts the checkpoint, as in `longitude.hf.patched`. vLLM sends the settings, in
`additional_config`, to all of its processes, and includes them in the key of its compiled graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longitude.core.store import read_json
from longitude.core.validate import UserError, shown, target_length

KEY, FILE, CONFIG = "longitude", "longitude.json", "config.json"
WORKER = "longitude.serving.worker.Worker"
TESTED = ("0.30", "0.31", "0.32")
DRAFTS = ("ngram", "ngram_gpu", "suffix")  # speculative decoding without a draft model


@dataclass(frozen=True)
class Settings:
    """A scheme and the longest input it is served with."""

    scheme: str
    to: int
    force: bool = False

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """Read the settings of an engine that `prepare` has set up."""
        return cls(**vllm_config.additional_config[KEY])


def requested(args: Any) -> Mapping[str, Any] | None:
    """Return the entry that names a scheme, in the engine's arguments or the model's folder."""
    additional = args.additional_config
    if isinstance(additional, dict) and KEY in additional:
        return additional[KEY]
    folder = Path(args.model).expanduser()
    if (folder / FILE).is_file():
        return read_json(folder / FILE)
    saved = read_json(folder / CONFIG, optional=True).get(KEY)
    if saved is None or "rope_parameters" in saved:  # vLLM reads rope_parameters itself
        return None
    return {"scheme": saved["scheme"], "to": saved.get("target"), "force": saved.get("force")}


def prepare(args: Any) -> Settings:
    """Validate the scheme against the model's configuration, and set up the engine's arguments."""
    import vllm  # pyright: ignore[reportMissingImports]

    version = str(vllm.__version__)
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        raise UserError(
            f"schemes were tested in vLLM {', '.join(TESTED)}, but this is {version}: install one "
            f"of those, or serve without a scheme."
        )
    entry = requested(args)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("scheme"), str):
        raise UserError(
            f'"{KEY}" takes {{"scheme": "rope(…)", "to": 32768}}, but got {shown(entry)}: correct '
            f"it in --additional-config or in {FILE}."
        )
    if unknown := sorted(set(entry) - {"scheme", "to", "force", "version"}):
        raise UserError(
            f'"{KEY}" takes scheme, to and force, but got {shown(unknown)}: leave it out.'
        )
    if args.worker_cls != "auto":
        raise UserError(
            f"a scheme needs a worker of its own, but got --worker-cls {args.worker_cls}: leave "
            f"that out."
        )
    hf_config = _hf_config(args)
    settings = _resolved(entry, hf_config, args.max_model_len)
    args.max_model_len = args.max_model_len if _is_length(args.max_model_len) else settings.to
    args.worker_cls = WORKER
    additional = args.additional_config if isinstance(args.additional_config, dict) else {}
    args.additional_config = {**additional, KEY: asdict(settings)}
    _allow_length(args, hf_config)
    return settings


def _is_length(max_model_len: Any) -> bool:
    return isinstance(max_model_len, int) and max_model_len > 0  # -1: as much as fits in memory


def _hf_config(args: Any) -> Any:
    """The model's configuration, as vLLM reads it."""
    from vllm.transformers_utils.config import get_config  # pyright: ignore[reportMissingImports]

    given = args.hf_overrides
    overrides = (
        {"hf_overrides_fn": given} if callable(given) else {"hf_overrides_kw": dict(given or {})}
    )
    return get_config(
        args.hf_config_path or args.model,
        trust_remote_code=args.trust_remote_code,
        revision=args.revision,
        code_revision=args.code_revision,
        config_format=args.config_format,
        **overrides,
    )


def _resolved(entry: Mapping[str, Any], whole: Any, limit: Any) -> Settings:
    """Return settings with a length in tokens; raises if the scheme does not fit the model."""
    from longitude.hf.patch import window
    from longitude.serving.schemes import check_schemes

    trained = window(whole)
    to = entry.get("to") or (limit if _is_length(limit) else None) or trained
    if to is None or (trained is None and str(to).strip().lower().endswith("x")):
        raise UserError(
            f'the model\'s configuration states no window, but got "to": {shown(entry.get("to"))}: '
            f"give a number of tokens."
        )
    length = target_length(str(to), trained or 1)
    if trained is not None and length < trained:
        raise UserError(
            f"the model reads {trained:,} tokens as it is, but got a target of {length:,}: give a "
            f"longer one, or shorten the model with --max-model-len and no scheme."
        )
    if _is_length(limit) and limit > length:
        raise UserError(
            f"--max-model-len {limit} is longer than the scheme's target of {length}: raise the "
            f"target or leave --max-model-len out."
        )
    settings = Settings(entry["scheme"], length, bool(entry.get("force", False)))
    check_schemes(whole.get_text_config(), settings.scheme, settings.to, settings.force)
    return settings


def _allow_length(args: Any, whole: Any) -> None:
    """Set `model_max_length`: vLLM accepts a --max-model-len above the configuration's up to it."""
    length, hf_overrides = args.max_model_len, args.hf_overrides
    if callable(hf_overrides):

        def longer(config: Any) -> Any:
            config = hf_overrides(config)
            config.get_text_config().model_max_length = length
            return config

        args.hf_overrides = longer
        return
    entries: dict[str, Any] = {"model_max_length": length}
    inside = next((n for n in vars(whole) if getattr(whole, n) is whole.get_text_config()), None)
    if whole.get_text_config() is not whole and inside is not None:
        own = dict(hf_overrides or {}).get(inside) or {}
        entries = {inside: {**own, **entries}}
    args.hf_overrides = {**(hf_overrides or {}), **entries}


def check_engine(config: Any, settings: Settings) -> None:
    """Raise if the engine can't serve a scheme, and name what prevents it."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.utils.torch_utils import (  # pyright: ignore[reportMissingImports]
        is_quantized_kv_cache,
    )

    from longitude.serving.schemes import dynamic_part

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    method = config.speculative_config.method if config.speculative_config else None
    images = model.multimodal_config is not None and not model.multimodal_config.language_model_only
    refusals = {
        f"the device {current_platform.device_name}": not (
            current_platform.is_cpu() or current_platform.is_cuda()
        ),
        "multi-head latent attention (MLA: its cache holds rotated keys)": model.use_mla,
        "an encoder-decoder model (cross attention)": model.is_encoder_decoder,
        "images or audio (--language-model-only serves the text alone)": images,
        "vLLM's transformers backend (--model-impl vllm)": model.using_transformers_backend(),
        f"a cache of {cache.cache_dtype} (--kv-cache-dtype auto)": is_quantized_kv_cache(
            cache.cache_dtype
        ),
        f"speculation by {method} (use {' or '.join(DRAFTS)})": method not in (None, *DRAFTS),
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "a cache that is sent to other engines (--kv-transfer-config)": (
            config.kv_transfer_config is not None
        ),
    }
    conflicts = [what for what, there in refusals.items() if there]
    if conflicts:
        raise UserError(f"longitude can't serve {settings.scheme} with {', '.join(conflicts)}.")
    dynamic = dynamic_part(model.hf_text_config, settings.scheme, settings.force)
    if dynamic is not None and cache.enable_prefix_caching:
        raise UserError(
            f"under {shown(dynamic)} every hidden state depends on the total length, and a cached "
            f"prefix would be wrong for another: use stepped(…), which gives each position its own "
            f"factor, or --no-enable-prefix-caching, which fixes the length at {settings.to:,}."
        )
