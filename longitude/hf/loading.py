"""Any checkpoint, loaded: a name on the Hub, a folder, a GGUF file, or one of the package's own.

The weights are read once and kept once. What transformers would pass over with a warning is an
error here: weights that the file lacks (it fills them in at random), weights of another shape,
layers that the configuration leaves out, a rotation that is not the file's (faults.py, mend.py).

A model's fingerprint: rows and summaries are kept under it, and no other model finds them.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longitude.core.validate import UserError, short, shown
from longitude.hf.device import device_of, dtype_of, quiet_transformers
from longitude.hf.faults import faults
from longitude.hf.gguf_config import fix_config
from longitude.hf.gguf_reader import Header, read_header, read_once
from longitude.hf.peft import merged
from longitude.hf.source import SCHEME as SCHEME
from longitude.hf.source import Source, as_user_error, find, has_one_of, raw_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
TOKENIZER = "tokenizer.json tokenizer_config.json tokenizer.model vocab.json vocab.txt spiece.model"


def load(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
    base: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A model and its tokenizer, which is None where a checkpoint has none.

    Args:
        name: a name on the Hub, a folder, a .gguf file (its weights are dequantised), or tiny-rope,
            tiny-alibi or tiny-learned, which come with the package. What `save` wrote gets the
            scheme back that was applied to it. An adapter's folder is its base with the adapter
            merged in, under the scheme that lies beside it.
        device: auto (CUDA where there is CUDA), cpu, cuda, cuda:1, mps.
        dtype: auto (the file's own on CUDA; float32 on a CPU, see choose.py), float32, bfloat16,
            float16, float64.
        revision: a branch, tag or commit on the Hub.
        trust_remote_code: run Python code that comes with the checkpoint.
        quiet: don't say on stderr what was chosen, and show no progress.
        base: where an adapter's base is, if it was moved; one with other weights is refused.
    """
    source, place = find(name, revision, base), device_of(device)
    with quiet_transformers(bars=not quiet and sys.stderr.isatty()), _readable(source):
        opened = _opened(source, trust_remote_code)
        kind, why = dtype_of(dtype, opened.dtype, place)
        model = _model(source, opened, kind, place, trust_remote_code)
        model = model if source.adapter is None else merged(model, source.adapter)
        tokenizer = _tokenizer(source, opened, trust_remote_code)
    if opened.scheme:
        _apply(source, model, opened.scheme)
    if not quiet:
        _say(source, opened, model, f"on {place} in {str(kind).removeprefix('torch.')} ({why})")
    return model, tokenizer


def without_weights(
    name: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[int | None, PreTrainedTokenizerBase | None]:
    """What can be told of a checkpoint before its weights are read: its trained window, and its
    tokenizer."""
    from longitude.hf.patch import window

    source = find(name, revision)
    with quiet_transformers(bars=False), _readable(source):
        opened = _opened(source, trust_remote_code)
        return window(opened.config), _tokenizer(source, opened, trust_remote_code)


def _say(source: Source, opened: _Opened, model: Any, chosen: str) -> None:
    size = sum(p.numel() for p in model.parameters()) / 1e6
    held = f"from {source.gguf or opened.file.parent}"
    if source.adapter is not None:
        held += f" and the adapter {source.adapter.folder}"
        held += ", which names no scheme and reads with its base's" * (opened.scheme is None)
    print(
        f"{source.name}: {type(model).__name__}, {size:,.1f}M parameters, {chosen}, {held}.",
        file=sys.stderr,
    )


def _readable(source: Source) -> AbstractContextManager[None]:
    """What it takes to read this kind of source."""
    if source.gguf is None:
        return nullcontext()
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise UserError(
                f"a .gguf file needs the package {package}: pip install longitude[gguf]."
            )
    return read_once()


class _Opened:
    """A checkpoint whose configuration has been read and found good."""

    def __init__(self, file: Path, config: Any, *, header: Header | None, scheme: Any) -> None:
        self.file, self.config, self.header, self.scheme = file, config, header, scheme

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of the file's weights, as far as it says."""
        own = getattr(self.config, "dtype", None)
        own = getattr(torch, own, None) if isinstance(own, str) else own
        return own if self.header is None and isinstance(own, torch.dtype) else None


def _opened(source: Source, trust: bool) -> _Opened:
    from transformers import AutoConfig

    if source.gguf:
        return _opened_gguf(source, source.gguf)
    file, raw = raw_config(source)
    _check_code(source, raw, trust)
    for fault in faults(raw):
        # with several positions at once a model runs all the same; it only can't be patched
        if fault.serious and fault.name != "several positions":
            raise UserError(f"{source.name}: {fault.sentence}")
    with as_user_error(source, "config.json"):
        config = AutoConfig.from_pretrained(source.place, trust_remote_code=trust, **source.where)
    scheme = raw.get(SCHEME)
    if scheme is not None:
        vars(config).pop(SCHEME, None)  # the model itself knows what was applied to it
        _as_before(source, config, scheme)
    return _Opened(file, config, header=None, scheme=scheme)


def _as_before(source: Source, config: Any, scheme: Any) -> None:
    """The configuration without what `save` wrote into it for transformers alone."""
    if not isinstance(scheme, dict) or not isinstance(scheme.get("scheme"), str):
        raise UserError(
            f"{source.name}: the entry {SCHEME} of config.json is no scheme: remove it."
        )
    if "rope_parameters" in scheme:
        config.rope_parameters = scheme["rope_parameters"]


def _opened_gguf(source: Source, file: Path) -> _Opened:
    from transformers import AutoConfig

    header = read_header(file)
    with as_user_error(source, f"header (architecture {header.keys['general.architecture']!r})"):
        config = AutoConfig.from_pretrained(source.place, **source.where)
    fix_config(config, header)
    scheme = source.adapter.entry if source.adapter else None
    return _Opened(file, config, header=header, scheme=scheme)


def _check_code(source: Source, raw: dict[str, Any], trust: bool) -> None:
    """Raise where a model is not one of transformers' own."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, remote = raw.get("model_type"), raw.get("auto_map") or {}
    names = raw.get("architectures") or []
    if kind is None and not remote:
        raise UserError(f"{source.name}: config.json names no model_type: add it.")
    own = kind in CONFIG_MAPPING and all(hasattr(transformers, n) for n in names)
    if remote and not own and not trust:
        raise UserError(
            f"{source.name} is a {shown(kind)} whose code comes with it: read that code, and load "
            "it with trust_remote_code=True (--trust-remote-code) if you trust it."
        )
    if kind not in CONFIG_MAPPING and not remote:
        raise UserError(
            f"{source.name} is a {shown(kind)}, which transformers {transformers.__version__} does "
            "not know: update transformers or correct model_type in config.json."
        )


def _class(config: Any, trust: bool) -> Any:
    """The class that a checkpoint names as its own; where it names none, what its kind suggests."""
    import transformers

    remote = getattr(config, "auto_map", None) or {}
    for name in AUTO if trust else ():
        if name in remote:
            return getattr(transformers, name)
    for name in getattr(config, "architectures", None) or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    two = getattr(config, "is_encoder_decoder", False)
    for name in AUTO[1:] if two else AUTO:
        if type(config) in getattr(transformers, name)._model_mapping:
            return getattr(transformers, name)
    raise UserError(f"transformers has no model for {type(config).__name__}: give another one.")


def _model(
    source: Source, opened: _Opened, dtype: torch.dtype, device: torch.device, trust: bool
) -> Any:
    kind = _class(opened.config, trust)
    options: dict[str, Any] = {"config": opened.config, "dtype": dtype, **source.where}
    if device.type != "cpu" and find_spec("accelerate"):
        options["device_map"] = {"": device}  # straight to the device
    if trust:
        options["trust_remote_code"] = True
    if opened.header:
        options["quantization_config"] = _dequantised()
    with as_user_error(source, "weights"):
        model, info = kind.from_pretrained(
            source.place, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        _check_weights(source, model, info)
        if opened.header:
            _unquantised(model)
        return model.to(device).eval()


def _dequantised() -> Any:
    from transformers import GgufConfig

    return GgufConfig(dequantize=True)


def _unquantised(model: Any) -> None:
    """Forget that the weights came in blocks: they are plain now, and can be saved."""
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        vars(owner).pop(name, None)


def _check_weights(source: Source, model: Any, info: dict[str, Any]) -> None:
    """Raise unless every parameter came from the file, and every layer of the file is there."""
    where = f"{source.name}: its configuration and its weights don't belong together:"
    for name, held, wanted in sorted(info["mismatched_keys"]):
        raise UserError(f"{where} {name} is {tuple(held)}, but should be {tuple(wanted)}.")
    own = dict(model.named_parameters())
    missing = sorted(set(info["missing_keys"]) & set(own))
    if missing:
        raise UserError(f"{where} {_some(missing)} missing, and would be random.")
    shapes = {_any_layer(name) for name in own}
    left = sorted(n for n in info["unexpected_keys"] if n not in own and _any_layer(n) in shapes)
    if left:
        raise UserError(f"{where} {_some(left)} left over, so layers would be left out.")


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".#.", name)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return names[0] + more


def _tokenizer(source: Source, opened: _Opened, trust: bool) -> Any:
    from transformers import AutoTokenizer

    if opened.header:
        held = "tokenizer.ggml.tokens" in opened.header.keys
    else:
        held = has_one_of(source, TOKENIZER.split())
    if not held:
        return None
    options = source.where | ({"trust_remote_code": True} if trust else {})
    with as_user_error(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source.place, **options)


def _apply(source: Source, model: Any, saved: dict[str, Any]) -> None:
    from longitude.hf.patch import apply

    try:
        apply(model, saved["scheme"], length=saved.get("length"), force=saved.get("force", False))
    except UserError as mistake:
        raise UserError(
            f"{source.name} was saved with {short(saved['scheme'])}, which is refused: {mistake}"
        ) from mistake


SAMPLE = 4096  # numbers of each tensor that enter the digest


@torch.no_grad()
def digest(model: Any) -> str:
    """16 hexadecimal digits of every tensor's name, shape and a sample of its numbers: whole for
    small ones, evenly spaced for others, so that a large model costs no more than a small one."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tuple(tensor.shape)} ".encode())
        flat = tensor.reshape(-1)
        every = flat[:: max(1, len(flat) // SAMPLE)].float().cpu()
        found.update(every.numpy().tobytes())
    return found.hexdigest()[:16]
