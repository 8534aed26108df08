"""Measure every context-extension method on one model, and recommend one."""
