"""Attention under a scheme: inputs, passes, the plan, and the backends that run it."""
