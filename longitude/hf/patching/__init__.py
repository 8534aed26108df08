"""How a model is patched: what a probe finds, where attention sits, what a forward shares."""
