"""Any scheme inside stock vLLM: a plugin that `pip install "longitude[vllm]"` brings.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). It wraps
one function, the one that makes an engine's configuration. Where neither the model's folder nor the
engine's arguments name a scheme, that call is passed through, and nothing else is changed.

With a scheme (settings.py), the engine gets a worker of ours (worker.py). Once vLLM has loaded the
model, that worker checks each attention layer against the configuration, takes the rotation out, so
that the paged cache holds pre-RoPE keys, and puts our attention (backend.py) in. It is the model's
instances that change: no class of vLLM is replaced, and scheduler, cache manager and sampler are
vLLM's own.
"""

from __future__ import annotations

import sys
from functools import wraps
from pathlib import Path
from typing import Any

MARK = "_longitude"  # an attribute of the function that takes the place of vLLM's


def register() -> None:
    """The plugin. It may be called many times in one process."""
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
            if Path(sys.argv[0]).name == "vllm":  # a command: one sentence, and no traceback
                raise SystemExit(f"longitude: {error}") from None
            raise
        return config

    setattr(create_engine_config, MARK, True)
    EngineArgs.create_engine_config = create_engine_config
