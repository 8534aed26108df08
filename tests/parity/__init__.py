"""The library beside transformers: the same numbers from tiny random modules, no network."""
