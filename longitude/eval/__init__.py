"""Measurements of a model at a length, and the texts that they are taken on."""
