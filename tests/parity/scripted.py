"""DeBERTa's modules: they call `torch.jit.script` when imported, which newer torch warns about."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers.models.deberta import modeling_deberta as deberta
    from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta_v2

__all__ = ["deberta", "deberta_v2"]
