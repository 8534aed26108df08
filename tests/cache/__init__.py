"""Tests of longitude.cache."""
