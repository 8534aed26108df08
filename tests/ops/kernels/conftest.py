"""Kernels run in Triton's interpreter where there is no GPU.

The variable is read when a kernel is defined, so it is set before any test here is imported; no
other test reaches a kernel on a CPU.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
