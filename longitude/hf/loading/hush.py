"""transformers without its chatter: we say in one line what it says in pages, or raise.

While it is hushed it also asks no bot on the Hub to convert a checkpoint: nothing is sent anywhere.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator

NO_BOT = "DISABLE_SAFETENSORS_CONVERSION"


@contextlib.contextmanager
def hushed(*, bars: bool) -> Iterator[None]:
    """No warnings logged, and no progress bars unless asked for; afterwards all is as it was."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    bot = os.environ.get(NO_BOT)
    levels = [(log, log.get_verbosity()) for log in (logging, hub)]
    for log, _ in levels:
        log.set_verbosity_error()
    os.environ[NO_BOT] = "1"
    try:
        with contextlib.nullcontext() if bars else _barless():
            yield
    finally:
        for log, level in levels:
            log.set_verbosity(level)
        if bot is None:
            del os.environ[NO_BOT]
        else:
            os.environ[NO_BOT] = bot


@contextlib.contextmanager
def _barless() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    # the bar of GGUF files is tqdm's own, which only looks at the stream
    with contextlib.redirect_stderr(io.StringIO()):
        _switch(False)
        try:
            yield
        finally:
            if shown:
                _switch(True)


def _switch(on: bool) -> None:
    """Bars on or off; huggingface_hub warns where an environment variable already decides."""
    from transformers.utils import logging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.enable_progress_bar() if on else logging.disable_progress_bar()
