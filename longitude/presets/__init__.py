"""Each named method of the literature as a function that returns its scheme, with its paper.

A preset is written like a part: `parse("streaming_llm(4, 1020)")`. Joined with parts by +, it adds
to them.
"""

from longitude.presets.absolute import *  # noqa: F403
from longitude.presets.biases import *  # noqa: F403
from longitude.presets.mixtures import *  # noqa: F403
from longitude.presets.remaps import *  # noqa: F403
from longitude.presets.rotations import *  # noqa: F403
from longitude.presets.table import PAPERS as PAPERS
from longitude.presets.table import PRESETS as PRESETS

__all__ = [*PRESETS, "PAPERS", "PRESETS"]  # pyright: ignore[reportUnsupportedDunderAll]
