"""Benchmark suites: rotation, attention, decoding and whole models beside baselines and peers."""
