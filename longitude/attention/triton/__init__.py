"""Kernels of our own, in Triton: one a file, each beside the plain torch that says its formula.

Nothing here is imported until a tensor is on a CUDA device (`available.usable`).
"""
