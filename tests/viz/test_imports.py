"""Reports are drawn where torch may be missing."""

from __future__ import annotations

import pkgutil

import longitude.viz
from tests.cli.conftest import python


def test_no_module_of_viz_imports_torch() -> None:
    names = [m.name for m in pkgutil.iter_modules(longitude.viz.__path__, "longitude.viz.")]
    ran = python("-c", f"import sys, {', '.join(names)}; print('torch' in sys.modules)")
    assert ran.stdout == "False\n", ran.stderr
