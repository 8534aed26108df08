"""Settings as the text of a YAML file, a dictionary or list of numbers on one line where it fits.

PyYAML comes with transformers. It writes the point that it wants in numbers with an exponent,
1.0e-06, which JSON would leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yaml import safe_dump


def yaml(entries: Mapping[str, Any]) -> str:
    """A mapping, in its own order."""
    style = {"sort_keys": False, "allow_unicode": True, "width": 100}
    return safe_dump(dict(entries), default_flow_style=None, **style)
