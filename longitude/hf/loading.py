"""Loads any checkpoint: a name on the Hub, a folder, a GGUF file, or one bundled with the package.

The weights are read once and held once. What transformers only warns about is an error here:
weights that the file lacks (it fills them in at random), weights of another shape, layers that the
configuration leaves out, a rotation that is not the file's (faults.py, gguf_config.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from longitude.core.validate import UserError, short, shown
from longitude.hf.device import device_of, dtype_of, quiet_transformers
from longitude.hf.faults import check
from longitude.hf.gguf_config import fix_config
from longitude.hf.gguf_reader import Header, read_header
from longitude.hf.patch import WINDOW, apply, window
from longitude.hf.peft import merged
from longitude.hf.probe import replaced
from longitude.hf.source import SCHEME, Source, as_user_error, find, has_one_of, raw_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
TOKENIZER = "tokenizer.json tokenizer_config.json tokenizer.model vocab.json vocab.txt spiece.model"
DIGEST_SAMPLE = 4096  # numbers of each tensor that enter the digest


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
    """Load a model and its tokenizer, which is None if the checkpoint has none.

    Args:
        name: a name on the Hub, a folder, a .gguf file (its weights are dequantised), or tiny-rope,
            tiny-alibi or tiny-learned, which come with the package. A model that `save` wrote gets
            its scheme back. An adapter's folder gives its base with the adapter merged in, under
            the scheme saved beside the adapter.
        device: auto (CUDA if there is CUDA), cpu, cuda, cuda:1, mps.
        dtype: auto (the file's own on CUDA; float32 on a CPU, see device.py), float32, bfloat16,
            float16, float64.
        revision: a branch, tag or commit on the Hub.
        trust_remote_code: run Python code that comes with the checkpoint.
        quiet: don't print on stderr what was chosen, and show no progress.
        base: where an adapter's base is, if it was moved; a base with other weights is refused.
    """
    source, place = find(name, revision, base), device_of(device)
    with quiet_transformers(bars=not quiet and sys.stderr.isatty()), _gguf_reading(source):
        checkpoint = _open(source, trust_remote_code)
        kind, why = dtype_of(dtype, checkpoint.dtype, place)
        model = _load_model(source, checkpoint, kind, place, trust_remote_code)
        model = model if source.adapter is None else merged(model, source.adapter)
        tokenizer = _load_tokenizer(source, checkpoint, trust_remote_code)
    if saved := checkpoint.scheme:
        options = {"length": saved.get("length"), "force": saved.get("force", False)}
        try:
            apply(model, saved["scheme"], **options, saved=True)
        except UserError as error:
            raise UserError(
                f"{source.name} was saved with {short(saved['scheme'])}, which is refused: {error}"
            ) from error
    if source.adapter is not None:
        raise_window(model.config, source.adapter.target)
    if not quiet:
        size = sum(p.numel() for p in model.parameters()) / 1e6
        line = f"{source.name}: {type(model).__name__}, {size:,.1f}M parameters, on {place} in "
        line += f"{str(kind).removeprefix('torch.')} ({why}), "
        line += f"from {source.gguf or checkpoint.file.parent}"
        if source.adapter is not None:
            line += f" and the adapter {source.adapter.folder}"
            line += ", which names no scheme: the base's is used" * (saved is None)
        line += f", under {short(saved['scheme'])}, which it was saved with" if saved else ""
        print(f"{line}.", file=sys.stderr)
    return model, tokenizer


def without_weights(
    name: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[int | None, PreTrainedTokenizerBase | None]:
    """Return a checkpoint's trained window and tokenizer without reading its weights."""
    source = find(name, revision)
    with quiet_transformers(bars=False), _gguf_reading(source):
        checkpoint = _open(source, trust_remote_code)
        if source.adapter is not None:
            raise_window(checkpoint.config, source.adapter.target)
        return window(checkpoint.config), _load_tokenizer(source, checkpoint, trust_remote_code)


def raise_window(config: Any, length: int) -> None:
    """Raise every entry of a configuration that states its window to at least this length."""
    text = config.get_text_config()
    for name in WINDOW:
        if isinstance(own := getattr(text, name, None), int):
            setattr(text, name, max(length, own))


@contextmanager
def _gguf_reading(source: Source) -> Iterator[None]:
    """Make transformers parse a GGUF file only once while loading it.

    By itself it parses the vocabulary for configuration, weights and tokenizer, and builds the
    table of tensor names for every module: two thirds of the loading time. A third of the rest is
    slicing a memory map, which costs several times as much as slicing an array.
    """
    if source.gguf is None:
        yield
        return
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise UserError(
                f"a .gguf file needs the package {package}: pip install longitude[gguf]."
            )
    gguf = import_module("gguf")

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    names = functools.cache(gguf.get_tensor_name_map)
    with replaced(gguf, "GGUFReader", functools.cache(Reader)):
        with replaced(gguf, "get_tensor_name_map", names):
            yield


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint whose configuration has been read and validated."""

    file: Path
    config: Any
    scheme: dict[str, Any] | None  # as `save` wrote it
    header: Header | None = None  # of a GGUF file

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the file states for its weights, or None."""
        own = getattr(self.config, "dtype", None)
        own = getattr(torch, own, None) if isinstance(own, str) else own
        return own if self.header is None and isinstance(own, torch.dtype) else None


def _open(source: Source, trust: bool) -> _Checkpoint:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    read = transformers.AutoConfig.from_pretrained
    if source.gguf:
        header = read_header(source.gguf)
        with as_user_error(source, f"header (architecture {header.architecture!r})"):
            config = read(source.place, **source.where)
        fix_config(config, header)
        scheme = source.adapter.entry if source.adapter else None
        return _Checkpoint(source.gguf, config, scheme, header)
    file, raw = raw_config(source)
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
    check(raw, source.name)
    with as_user_error(source, "config.json"):
        config = read(source.place, trust_remote_code=trust, **source.where)
    scheme = raw.get(SCHEME)
    if scheme is not None:
        if not isinstance(scheme, dict) or not isinstance(scheme.get("scheme"), str):
            raise UserError(
                f"{source.name}: the entry {SCHEME} of config.json is no scheme: remove it."
            )
        vars(config).pop(SCHEME, None)
        if "rope_parameters" in scheme:  # restore what `save` replaced
            config.rope_parameters = scheme["rope_parameters"]
    return _Checkpoint(file, config, scheme)


def _load_model(
    source: Source, checkpoint: _Checkpoint, dtype: torch.dtype, device: torch.device, trust: bool
) -> Any:
    """Load a model in the class that its checkpoint names, or else in a fitting auto class."""
    import transformers

    config = checkpoint.config
    remote = (getattr(config, "auto_map", None) or {}) if trust else {}
    named = [*(n for n in AUTO if n in remote), *(getattr(config, "architectures", None) or [])]
    autos = AUTO[1:] if getattr(config, "is_encoder_decoder", False) else AUTO
    names = [name for name in named if hasattr(transformers, name)]
    names = names or [n for n in autos if type(config) in getattr(transformers, n)._model_mapping]
    if not names:
        raise UserError(f"transformers has no model for {type(config).__name__}: give another one.")
    options: dict[str, Any] = {"config": config, "dtype": dtype, **source.where}
    if device.type != "cpu" and find_spec("accelerate"):
        options["device_map"] = {"": device}  # loads straight onto the device
    if trust:
        options["trust_remote_code"] = True
    if checkpoint.header:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with as_user_error(source, "weights"):
        model, info = getattr(transformers, names[0]).from_pretrained(
            source.place, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        _check_weights(source, model, info)
        if checkpoint.header:  # the weights are dequantised now, and can be saved
            for name in ("hf_quantizer", "is_quantized", "quantization_method"):
                vars(model).pop(name, None)
            vars(model.config).pop("quantization_config", None)
        return model.to(device).eval()


def _check_weights(source: Source, model: Any, info: dict[str, Any]) -> None:
    """Raise unless the file has every parameter, and the model every layer of the file."""

    def any_layer(name: str) -> str:
        return re.sub(r"\.\d+\.", ".#.", name)

    def listed(names: list[str]) -> str:
        return names[0] + (f" and {len(names) - 1} more are" if len(names) > 1 else " is")

    where = f"{source.name}: its configuration and its weights don't belong together:"
    for name, stored, needed in sorted(info["mismatched_keys"]):
        raise UserError(f"{where} {name} is {tuple(stored)}, but should be {tuple(needed)}.")
    own = dict(model.named_parameters())
    missing = sorted(set(info["missing_keys"]) & set(own))
    if missing:
        raise UserError(f"{where} {listed(missing)} missing, and would be random.")
    shapes = {any_layer(name) for name in own}
    extra = sorted(n for n in info["unexpected_keys"] if n not in own and any_layer(n) in shapes)
    if extra:
        raise UserError(f"{where} {listed(extra)} left over, so layers would be left out.")


def _load_tokenizer(source: Source, checkpoint: _Checkpoint, trust: bool) -> Any:
    from transformers import AutoTokenizer

    if checkpoint.header:
        exists = "tokenizer.ggml.tokens" in checkpoint.header.keys
    else:
        exists = has_one_of(source, TOKENIZER.split())
    if not exists:
        return None
    options = source.where | ({"trust_remote_code": True} if trust else {})
    with as_user_error(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source.place, **options)


@torch.no_grad()
def digest(model: Any) -> str:
    """Return the fingerprint under which a model's results are stored: 16 hexadecimal digits of a
    hash over every tensor's name, shape and an evenly spaced sample of its numbers. A sample, so
    that a large model costs no more than a small one."""
    sha256 = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha256.update(f"{name} {tuple(tensor.shape)} ".encode())
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, len(flat) // DIGEST_SAMPLE)].float().cpu()
        sha256.update(sample.numpy().tobytes())
    return sha256.hexdigest()[:16]
