"""The table of presets, filled by `@preset`."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from longitude.fields import check_arguments
from longitude.scheme import Layers, Scheme

F = TypeVar("F", bound=Callable[..., Scheme | Layers])
PRESETS: dict[str, Callable[..., Scheme | Layers]] = {}
PAPERS: dict[str, str] = {}


def preset(paper: str) -> Callable[[F], F]:
    """Enter a function into the table under its own name, its arguments checked like a part's."""

    def enter(make: F) -> F:
        @wraps(make)
        def checked(*args: object, **kwargs: object) -> Scheme | Layers:
            check_arguments(make, args, kwargs)
            return make(*args, **kwargs)

        PRESETS[make.__name__], PAPERS[make.__name__] = checked, paper
        return checked  # type: ignore[return-value]

    return enter
