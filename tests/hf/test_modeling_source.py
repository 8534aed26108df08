"""Code read as text: what a configuration reaches, and which of its branches live."""

from __future__ import annotations

from types import SimpleNamespace

from transformers import AutoConfig

from longitude.hf.modeling_source import kinds, live, live_source, pair_layout, roots_of

SOURCE = """class Thing(nn.Module):
    def __init__(self, config):
        self.kind = getattr(
            config, "kind", "absolute"
        )
        if self.kind == "absolute":
            self.table = One(config)
        elif self.kind == "rotary":
            self.turn = Two(config)
        else:
            self.other = Three(config)
        if config.wide:
            self.wide = Four(config)
        if not config.wide and something:
            self.open = Five(config)
"""


def words(**entries: object) -> set[str]:
    text = live(SOURCE, SimpleNamespace(**entries))
    return {w for w in ("One", "Two", "Three", "Four", "Five") if f"{w}(" in text}


def test_branches_follow_the_configuration() -> None:
    assert words(kind="absolute", wide=False) == {"One", "Five"}
    assert words(kind="rotary", wide=True) == {"Two", "Four", "Five"}
    assert words(kind="odd", wide=True) == {"Three", "Four", "Five"}


def test_what_can_not_be_told_lives() -> None:
    assert words() == {"One", "Two", "Three", "Four", "Five"}


def test_only_what_a_configuration_reaches() -> None:
    clip = AutoConfig.for_model("clip")
    assert "CLIPTextModel" in roots_of(clip.text_config)
    text, pictures = live_source(clip.text_config), live_source(clip.vision_config)
    assert "CLIPTextEmbeddings" in text and "CLIPVisionEmbeddings" not in text
    assert "CLIPVisionEmbeddings" in pictures and "CLIPTextEmbeddings" not in pictures
    assert kinds(live_source(clip)) == ()  # of its own it has none


def test_how_pairs_lie() -> None:
    half = "def rotate_half(x):\n    x1 = x[..., : x.shape[-1] // 2]\n"
    adjacent = "def rotate_half(x):\n    x1 = x[..., ::2]\n    return torch.stack((-x2, x1))\n"
    apart = "def apply_rotary(q):\n    q1 = q[..., 0::2]\n    return torch.cat([q1, q2])\n"
    assert pair_layout({"rotate_half": half}) == ("half", False)
    assert pair_layout({"rotate_half": adjacent}) == ("adjacent", False)
    assert pair_layout({"apply_rotary": apart}) == ("half", True)
