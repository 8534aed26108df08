"""Tests of longitude/inspection."""

"""Tests of longitude/inspection."""
