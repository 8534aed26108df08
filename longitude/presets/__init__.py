"""Presets: each named method of the literature as a function that returns its scheme.

A preset is written like a part: `parse("streaming_llm(4, 1020)")`. Joined with parts by +, it adds
to them. presets.toml lists them all, with their papers; most are a text with slots for their
parameters, and those that compute something are the functions below.
"""

import inspect
import math
import tomllib
from collections.abc import Callable
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longitude import parts
from longitude.core.scheme import Layers, Scheme, Split, scheme_of
from longitude.core.validate import UserError, check_arguments, literal

Preset = Callable[..., Scheme | Layers]
_ENTRIES = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PAPERS: dict[str, str] = {name: entry["paper"] for name, entry in _ENTRIES.items()}


def su_rerope(train: int = 4096, base: float = 10000) -> Scheme:
    return Scheme.of(parts.Rope(base, remap=parts.Rerope(train // 4)), parts.LogN(train))


def su_leaky_rerope(train: int = 4096, factor: float = 16, base: float = 10000) -> Scheme:
    remap = parts.LeakyRerope(train // 4, factor)
    return Scheme.of(parts.Rope(base, remap=remap), parts.LogN(train))


def su_inverse_leaky(train: int = 512, factor: float = 8) -> Scheme:
    return Scheme.of(parts.Rope(remap=parts.InverseLeaky(train // 4, 2 * factor)))


def adagrope_llama(train: int = 4096, base: float = 10000) -> Scheme:
    return Scheme.of(parts.Rope(base, remap=parts.AdaGroPE(train // 2)))


def chunk_llama(train: int = 4096, base: float = 10000) -> Scheme:
    return Scheme.of(parts.Rope(base, remap=parts.DualChunk(3 * train // 4, train // 8)))


def string_llama(train: int = 8192, local: int = 128, base: float = 500_000) -> Scheme:
    return Scheme.of(parts.Rope(base, remap=parts.String(train // 3, local)))


def string_released(train: int = 8192, local: int = 128, base: float = 500_000) -> Scheme:
    cooled = parts.Temperature((0.1 * math.log(2) + 1) ** -2)
    return Scheme.of(parts.Rope(base, remap=parts.String(train // 3, local)), cooled)


def fox(gate: Literal["full", "bias", "fixed"] = "full") -> Scheme:
    return Scheme.of(parts.Forget(gate))


def kerple(kind: Literal["log", "power"] = "log") -> Scheme:
    return Scheme.of(parts.KerplePower() if kind == "power" else parts.KerpleLog())


def hwfa(train: int = 512, layers: int = 24, window: int = 16) -> Layers:
    if not 2 <= layers <= 1000:
        raise UserError(f"hwfa: layers must be 2 to 1000, but got {layers}: 24 is the post's.")
    local = Scheme.of(parts.Rope(), parts.Window(window))
    return Layers((*[local] * (layers - 1), Scheme.of(parts.LogN(train, clip=False))))


def split(
    near: Scheme = scheme_of(parts.Streaming(4, 2044)),  # noqa: B008 (a scheme is frozen)
    far: Scheme = scheme_of(parts.Rerope(512)),  # noqa: B008
    share: float = 0.5,
) -> Layers:
    return Split((near, far), share)


def su_ntk_old(factor: float = 4, base: float = 10000) -> Scheme:
    return Scheme.of(parts.Rope(base * factor))


def rope_id(train: int = 4096, head_dim: int = 128) -> Scheme:
    dims = head_dim // 2
    if dims <= 2 or train < 7:
        raise UserError(
            f"rope_id: half of a head must be two pairs or more and a turn 7 tokens, but got a "
            f"head of {head_dim} and {train} tokens: 128 and 4096 are usual."
        )
    base = (train / (2 * math.pi)) ** (dims / (dims - 2))
    return Scheme.of(parts.Rope(base, fraction=0.5))


def longrope_phi3(
    short: tuple[float, ...], long: tuple[float, ...], original: int = 4096, factor: float = 32
) -> Scheme:
    frequencies = parts.LongRope(short, long, original=original, factor=factor)
    return Scheme.of(parts.Rope(frequencies=frequencies))


def _from_text(text: str, parameters: dict[str, Any]) -> Preset:
    """The preset whose scheme is a text with a slot for each parameter."""
    given = []
    for name, value in parameters.items():
        kind = tuple[int, ...] if isinstance(value, list) else type(value)
        value = tuple(value) if isinstance(value, list) else value
        given.append(
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value, annotation=kind)
        )
    signature = inspect.Signature(given)

    def build(*args: object, **kwargs: object) -> Scheme | Layers:
        from longitude.core.text import parse  # late: it knows presets

        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return parse(text.format(**{name: literal(v) for name, v in bound.arguments.items()}))

    build.__signature__ = signature  # type: ignore[attr-defined]
    build.__annotations__ = {one.name: one.annotation for one in given}
    return build


def _preset(name: str, meaning: str, scheme: str = "", parameters: Any = None, **_: Any) -> Preset:
    """An entry of presets.toml as a function that validates its arguments like a part's."""
    build: Preset = _from_text(scheme, parameters or {}) if scheme else globals()[name]
    build.__name__, build.__qualname__, build.__doc__ = name, name, meaning

    @wraps(build)
    def checked(*args: object, **kwargs: object) -> Scheme | Layers:
        check_arguments(build, args, kwargs)
        return build(*args, **kwargs)

    return checked


PRESETS: dict[str, Preset] = {name: _preset(name, **entry) for name, entry in _ENTRIES.items()}
globals().update(PRESETS)
__all__ = [*PRESETS, "PAPERS", "PRESETS"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Preset: ...
