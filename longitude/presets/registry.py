"""The register of presets: functions by name, their arguments validated like a part's."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import check_arguments

F = TypeVar("F", bound=Callable[..., Scheme | Layers])
PRESETS: dict[str, Callable[..., Scheme | Layers]] = {}
PAPERS: dict[str, str] = {}


def preset(paper: str) -> Callable[[F], F]:
    """Register a function under its own name, its arguments validated like a part's."""

    def register(make: F) -> F:
        @wraps(make)
        def checked(*args: object, **kwargs: object) -> Scheme | Layers:
            check_arguments(make, args, kwargs)
            return make(*args, **kwargs)

        PRESETS[make.__name__], PAPERS[make.__name__] = checked, paper
        return checked  # type: ignore[return-value]

    return register
