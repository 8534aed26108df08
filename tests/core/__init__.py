"""Tests of longitude.core."""
