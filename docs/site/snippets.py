"""The few lines of Python that use a method, by what it is: every one of them runs in a test."""

from __future__ import annotations

from longitude.core.part import Dims
from longitude.core.scheme import Layers, Scheme
from longitude.parts import Sequential

FURTHER = {"frequencies", "remap"}  # sites whose parts a checkpoint takes without training
ALSO = {"hierarchical", "learned_tiled", "learned_interpolated", "alibi_interpolated", "ntk_alibi"}
NOT = {"unscaled", "proportional", "inverse_leaky"}  # a model was trained with these, or never
PLAIN = """from longitude import attention, parse

scheme = parse("{text}")
out = attention(scheme, q, k, v, q_pos=range(n), k_pos=range(n))
"""
LEARNED = """from longitude import Dims
from longitude.nn import PositionAttention

attend = PositionAttention("{text}", Dims(dim=512, heads=8, head_dim=64))  # has its weights
out = attend(q, k, v, q_pos=range(n))
"""
LAYERED = """from longitude import Dims
from longitude.nn import PositionAttention

dims = Dims(dim=512, heads=8, head_dim=64)
layers = [PositionAttention("{text}", dims, layer=i) for i in range({count})]
out = layers[0](q, k, v, q_pos=range(n))
"""
EMBEDDED = """from longitude.nn import PositionEmbedding

embedding = PositionEmbedding("{text}", dim=512)  # has its weights, if there are any
x = embedding(x, pos=range(n))  # batch, tokens, width
"""
DRAWN = """import torch
from longitude import attention, parse

scheme = parse("{text}")
pos = scheme.positions.ids(n, rng=torch.Generator())  # in training; without rng as in a test
out = attention(scheme, q, k, v, q_pos=pos, k_pos=pos)
"""
PATCHED = """import longitude.hf as lh

model, tokenizer = lh.load("a hub name, a folder or a .gguf file")
with lh.patched(model, "{text}"):  # what it leaves out stays the checkpoint's own
    model.generate(**tokenizer("…", return_tensors="pt"))
"""


def snippet(text: str, scheme: Scheme | Layers) -> str:
    """How to compute with a scheme."""
    return _shape(scheme).format(text=text, count=len(scheme))


def on_a_checkpoint(text: str, name: str, site: str) -> str:
    """How to put it onto a checkpoint, where it needs no training."""
    takes = name in ALSO or (site in FURTHER and name not in NOT)
    return PATCHED.format(text=text) if takes else ""


def _shape(scheme: Scheme | Layers) -> str:
    if isinstance(scheme, Layers):
        return LAYERED
    if scheme.embed:
        return EMBEDDED
    if scheme.positions != Sequential():
        return DRAWN
    return LEARNED if scheme.init(Dims(dim=64, heads=1, head_dim=64)) else PLAIN
