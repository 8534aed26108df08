"""Every trainable encoding of the library, each at the sizes that suit a training window."""

from __future__ import annotations

from longitude.fields import Mistake
from longitude.lab.policy import Either, check_trainable
from longitude.text import dump, parse


def every(length: int, layers: int) -> tuple[str, ...]:
    """One scheme for each encoding that can be trained on `length` tokens."""
    quarter = max(2, length // 4)
    return (
        "causal()",  # no positions at all
        f"learned({length})",
        f"hierarchical({length})",
        f"multiplicative({length})",
        "sinusoidal()",
        "floater()",
        "rope()",
        "rope(decay=xpos())",
        f"rope(remap=inverse_leaky({quarter}, 16))",
        f"rope() + logn({length}, clip=False)",
        "rope() + ssmax()",
        f"rope() + window({quarter})",
        f"randomized({16 * length}) + rope()",
        f"equal_mean({length}) + rope()",
        f"pose({16 * length}) + rope()",
        "alibi()",
        "t5()",
        "kerple_log()",
        "kerple_power()",
        "sandwich()",
        f"fire(threshold={length})",
        f"shaw({quarter})",
        "transformer_xl()",
        f"deberta({length})",
        dump(parse(f"hwfa({length}, layers={layers}, window={hwfa_window(length, layers)})")),
    )


def hwfa_window(length: int, layers: int) -> int:
    """The window of HWFA's local layers: (w - 1)(layers - 1) + 1 = 3/4 of the length (Su 2023)."""
    return max(2, round((0.75 * length - 1) / max(1, layers - 1)) + 1)


def chosen(text: str, length: int, layers: int) -> tuple[Either, ...]:
    """The schemes of a `;`-separated list, or `all`; each parsed and found trainable."""
    names = every(length, layers) if text.strip() == "all" else text.split(";")
    schemes = tuple(dict.fromkeys(parse(name) for name in names if name.strip()))
    if not schemes:
        raise Mistake('--schemes names none: give some, as in "rope(); alibi()", or all.')
    for scheme in schemes:
        check_trainable(scheme, length, layers)
    return schemes
