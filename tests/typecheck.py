"""The run-time type check of the tests: beartype, with whole numbers passing as numbers (PEP 484).

Parts check their own fields and say a sentence about them, so they are left to do it.
"""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    makes_a_part = function.__name__ == "__init__" and function.__module__.startswith(
        "longitude.parts."
    )
    return function if makes_a_part else _check(function)
