"""A program: the decoder compiled is the decoder, in one graph where one pass does it."""

from __future__ import annotations

import torch

from longitude.training.lab.model import Decoder, DecoderConfig

TOKENS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
CASES = {
    "rope()": True,
    "rope(pairs='adjacent', fraction=0.5)": True,
    "rope(decay=xpos())": True,
    "rope(frequencies=yarn(2, original=16))": True,
    "learned(32)": True,
    "causal()": True,
    "alibi()": False,
    "t5()": False,
    "rope() + logn(16)": False,
    "rope(remap=inverse_leaky(8, 4))": False,
    "layers(rope() + window(8), logn(16))": False,
}


def gradients(run: object, model: Decoder) -> list[torch.Tensor]:
    model.zero_grad()
    run(TOKENS, None, TOKENS).backward()  # type: ignore[operator]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


torch._dynamo.config.recompile_limit = 100
for scheme, fullgraph in CASES.items():  # one after another: no scheme may run in another's graph
    model = Decoder(DecoderConfig(scheme, length=32, layers=2, dim=32, heads=2, hidden=32))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    for length in (16, 24):  # a second length must not break what is constant
        some = TOKENS[:, :length]
        torch.testing.assert_close(compiled(some), model(some), msg=lambda m, s=scheme: f"{s}: {m}")
    for ours, theirs in zip(gradients(model, model), gradients(compiled, model), strict=True):
        torch.testing.assert_close(ours, theirs)
