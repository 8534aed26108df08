"""Longitude timed beside its alternatives in one run, reported as ratios; these are no tests."""
