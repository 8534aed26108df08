"""Attention over a scheme: lowered to passes, run by a backend.

The package can be called, so that `longitude.attention` is the function and the room it lives in:
`attention(scheme, q, k, v, …)`, `attention.terms(…)` and `attention.explain(…)`, whichever was
imported first.
"""

import sys
from types import ModuleType
from typing import Any

from longitude.attention.explain import explain as explain
from longitude.attention.run import attention as attention
from longitude.attention.run import terms as terms


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
