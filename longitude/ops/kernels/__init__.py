"""Triton kernels, each tested against its eager reference; imported only where Triton runs."""
