"""The text form of a scheme: one grammar for the command line, stored results, reports and pages.

    rope(base=100000, frequencies=yarn(4, original=8192)) + logn(8192) + window(1020, sinks=4)
    layers(rope() + window(16), logn(512))
    split(streaming(4, 4092), rerope(1024), share=0.5)

Calls, names and literals only: the text is parsed with `ast` and never evaluated, and
`parse(dump(s)) == s`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import warnings
from typing import Any

from longitude.core.part import PARTS
from longitude.core.scheme import Layers, Scheme, scheme_of
from longitude.core.validate import UserError, short, shown
from longitude.presets import PRESETS

MAX_CHARS = 100_000
REFUSED = {  # methods that the six sites can't express (CONTRIBUTING.md says why)
    "fope": "FoPE (arXiv:2412.17739) mixes cosines of several frequencies in each pair, which is "
    "no rotation, and rope(…) rotates: use proportional(…), which drops slow pairs as FoPE does.",
    "path": "PaTH (arXiv:2505.16381) rewrites every key by each later token, so no key has a form "
    "that a cache or a kernel could keep: use forget(), whose gates read the text too.",
    "cope": "CoPE (arXiv:2405.18719) counts positions by the scores of a full row, which no kernel "
    "keeps: use forget(), whose gates read the text too.",
}


def dump(scheme: Scheme | Layers) -> str:
    """The text form of a scheme."""
    return str(scheme)


def parse(text: str, *, short_form: bool = False) -> Scheme | Layers:
    """Parse the text of a scheme; in short form, rerope(128) means rope(remap=rerope(128))."""
    if not isinstance(text, str):
        raise UserError(f"a scheme is read from a text, but got {shown(text)}: write rope(), say.")
    if len(text) > MAX_CHARS:
        raise UserError(
            f"a scheme of {len(text)} characters is too long: {MAX_CHARS} is the limit."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        value = _value(tree.body)
    except RecursionError:
        raise UserError("the scheme is nested too deeply: write it as parts joined by +.") from None
    except (SyntaxError, ValueError, MemoryError, OverflowError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(
            f"{shown(text)} is not a scheme ({_reason(e)}): write parts joined by +, as in "
            f"rope() + logn(8192)."
        ) from None
    if isinstance(value, Layers):
        return value
    return scheme_of(tuple(_parts(value))) if short_form else Scheme.of(*_parts(value))


def as_scheme(scheme: Any) -> Scheme | Layers:
    """Return the scheme itself, or parse its text."""
    if isinstance(scheme, str):
        return parse(scheme)
    if not isinstance(scheme, Scheme | Layers):
        raise UserError(
            f"a scheme or its text is needed, but got {shown(scheme)}: write one, as in "
            f"rope(remap=rerope(4096))."
        )
    return scheme


def _reason(error: Exception) -> str:
    """Python's own message for a wrong text or call, shortened."""
    if isinstance(error, SyntaxError):
        return short(error.msg, 120)
    return short(str(error), 120) if isinstance(error, TypeError) else "it can't be read"


def _value(node: ast.expr) -> Any:
    """A literal, a part, the parts of a sum (as a list), a Scheme or Layers."""
    match node:
        case ast.Constant(value=int() | float() | str() | bool() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_value(item) for item in items)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return [*_parts(_value(left)), *_parts(_value(right))]
        case ast.Name(id=name):
            return _call(name, [], {})
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            kwargs, values = {}, [_value(a) for a in args]
            for k in keywords:
                if k.arg is None:
                    message = "takes plain arguments, but got **: write them out."
                    raise UserError(f"{shown(name)} {message}")
                if k.arg in kwargs:
                    raise UserError(f"{shown(name)} got {shown(k.arg)} twice: give it once.")
                kwargs[k.arg] = _value(k.value)
            return _call(name, values, kwargs)
    raise UserError(
        f"{shown(ast.unparse(node))} is neither a part nor a number, string or tuple: "
        f"write parts joined by +, as in rope() + logn(8192)."
    )


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Layers):
        raise UserError("schemes of layers can't be joined by +: write + inside, layer by layer.")
    if isinstance(value, list):
        return value
    return list(value.parts) if isinstance(value, Scheme) else [value]


def _argument(value: Any) -> Any:
    """An argument of a preset: parts and sums of parts become schemes."""
    is_scheme = isinstance(value, list) or hasattr(value, "site")
    return scheme_of(tuple(_parts(value))) if is_scheme else value


def _call(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if name == "layers":
        if kwargs:
            raise UserError("layers(…) takes schemes only: write layers(a, a, b).")
        return Layers(tuple(scheme_of(tuple(_parts(a))) for a in args))
    build = PARTS.get(name) or PRESETS.get(name)
    if build is None and name in REFUSED:
        raise UserError(REFUSED[name])
    if build is None:
        title = f"{name.lower()}:"  # a preset's docstring may start with a title: "iRoPE:"
        similar = [n for n, p in PRESETS.items() if (p.__doc__ or "").lower().startswith(title)]
        similar += difflib.get_close_matches(name, [*PARTS, *PRESETS, "layers"], n=3, cutoff=0.5)
        known = " or ".join(similar) if similar else "one of those that `longitude schemes` lists"
        raise UserError(f"no part is called {shown(name)}: use {known}.")
    if name in PRESETS:
        args, kwargs = [_argument(a) for a in args], {k: _argument(v) for k, v in kwargs.items()}
    try:
        inspect.signature(build).bind(*args, **kwargs)
    except TypeError as e:
        takes = f"({', '.join(inspect.signature(build).parameters)})"
        if dataclasses.is_dataclass(build):
            fields = dataclasses.fields(build)
            names = [f.name + "=…" * (f.default is not dataclasses.MISSING) for f in fields]
            takes = f"{name}({', '.join(names)})" if names else "no arguments"
        raise UserError(f"{name}: {_reason(e)}: it takes {takes}.") from None
    return build(*args, **kwargs)
