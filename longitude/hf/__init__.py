"""Hugging Face: the only room that imports transformers, and only when it is called."""
