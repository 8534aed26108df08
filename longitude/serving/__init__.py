"""Run any scheme inside stock vLLM: a plugin, installed by `pip install "longitude[vllm]"`.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). It wraps
one function, the one that creates an engine's configuration. If neither the model's folder nor the
engine's arguments name a scheme, the wrapper only calls the original, and nothing else is changed.

With a scheme (settings.py), the engine gets our worker (worker.py). Once vLLM has loaded the model,
the worker checks each attention layer against the configuration, removes the rotation, so that the
paged cache holds pre-RoPE keys, and installs our attention (backend.py). Only instances of the
model's modules are changed: no class of vLLM is replaced, and scheduler, cache manager and sampler
are vLLM's own.
"""

from __future__ import annotations

import sys
from functools import wraps
from pathlib import Path
from typing import Any

MARK = "_longitude"  # an attribute that marks our wrapper of vLLM's function


def register() -> None:
    """Install the plugin. vLLM may call this many times in one process."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    stock = EngineArgs.create_engine_config
    if hasattr(stock, MARK):
        return

    @wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from longitude.serving.settings import requested

        if requested(self) is None:
            return stock(self, *args, **kwargs)
        from longitude.core.validate import UserError
        from longitude.serving.settings import check_engine, prepare

        try:
            settings = prepare(self)
            config = stock(self, *args, **kwargs)
            check_engine(config, settings)
        except UserError as error:
            if Path(sys.argv[0]).name == "vllm":  # on the command line: one sentence, no traceback
                raise SystemExit(f"longitude: {error}") from None
            raise
        return config

    setattr(create_engine_config, MARK, True)
    EngineArgs.create_engine_config = create_engine_config
