"""What it takes to read without end: a scheme under which every token is out of sight some day.

Xiao et al. 2023 (StreamingLLM) keep the first `sinks` tokens and the last `window`, and number them
by their place in the cache, so that sinks + window is the largest distance a model ever meets.

Choosing the next token: the likeliest one, or a draw from what a temperature and top-p leave.

Nucleus sampling, Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration": the fewest
tokens whose probabilities sum to p or more are drawn from. Draws are made on the CPU, so that a
seed means the same on every device.

Tokens as text while they come: a piece is given out once no later token can change it.

A letter may take several tokens, and what a token spells may depend on the one before it (a space,
most often). So each piece is what a few tokens spell more than those before them did.

A chat that never starts over: what a tokenizer's template adds for one more turn.

Templates write whole conversations, but a stream has read the earlier turns already and may have
forgotten them. So the template writes a short one with a known answer in it, and what follows that
answer, its end mark included, is what is fed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, shown
from longitude.hf.patch import trained_length
from longitude.hf.probe import rotary_owners

LATER = 2**40  # a position that no text comes to


def check(sinks: int, window: int) -> None:
    """Raise where these can't be, whatever the model."""
    if sinks < 0:
        raise UserError(f"sinks are 0 or more first tokens, but got {shown(sinks)}: use 4.")
    if window < 1:
        raise UserError(f"a window is 1 token or more, but got {shown(window)}: use 1020.")


def check_model(model: Any, wide: int | None) -> None:
    """Raise where a model can't stream, or not with so many positions."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"a stream is one text that goes on, but {name} reads one and writes another: use a "
            f"decoder."
        )
    if not rotary_owners(model):
        raise UserError(
            f"a stream gives tokens new positions as others leave, which takes rotary ones, and "
            f"{name} has none: use a RoPE model."
        )
    trained = trained_length(model)
    if wide is not None and trained is not None and wide > trained:
        raise UserError(
            f"sinks and window are {wide} positions, but the checkpoint was trained to {trained}: "
            f"let them be {trained} together at most."
        )


def streaming_scheme(sinks: int, window: int) -> str:
    """StreamingLLM's scheme. The mask says once more what the remap shows, for layers that have no
    rotation to remap."""
    if not sinks:
        return f"rope() + window({window})"
    return f"rope(remap=streaming({sinks}, {window})) + window({window}, {sinks})"


def check_evicts(scheme: Scheme | Layers) -> None:
    """Raise unless every layer reads forwards and forgets."""
    for one in (scheme.layer(i) for i in range(len(scheme))):
        if not one.causal:
            raise UserError(f"a stream reads forwards, but {shown(one)} sees ahead: use a decoder.")
        if not evicts(one):
            raise UserError(
                f"{shown(one)} keeps every token in sight, so its memory would grow without end: "
                f"add window(…), or leave the scheme out."
            )


def evicts(scheme: Scheme | Layers) -> bool:
    """Whether in every layer a token is out of sight some day, but for the first ones."""
    now, key = torch.tensor([[LATER]]), torch.tensor([[LATER // 2]])
    layers = [scheme.layer(i) for i in range(len(scheme))]
    return not any(bool(area.ever(now, key)) for one in layers for area in one.areas())


def cache_bytes(layer: Any) -> int:
    """What a layer of a cache holds: ours, or states of the model's own."""
    store = getattr(layer, "store", None)
    return _held(vars(layer)) if store is None else store.nbytes


def _held(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(_held, value))
    return value.nbytes if isinstance(value, Tensor) else 0


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. A temperature of 0 takes the likeliest; without a seed, draws differ
    from run to run."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"a temperature is 0 (the likeliest token) or more, but got "
                f"{shown(self.temperature)}: use 0 to 1.5."
            )
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"top_p is a share, but got {shown(self.top_p)}: use 0.9, or 1 for all."
            )

    def rng(self) -> torch.Generator:
        """What a run of draws is made with."""
        rng = torch.Generator()
        if self.seed is None:
            rng.seed()
        else:
            rng.manual_seed(self.seed)
        return rng

    def choose(self, logits: Float[Tensor, " v"], rng: torch.Generator) -> int:
        """One token."""
        if self.temperature == 0:
            return int(logits.argmax())
        shares = (logits.double().cpu() / self.temperature).softmax(-1)
        shares, tokens = shares.sort(descending=True, stable=True)
        shares = shares * (shares.cumsum(-1) - shares < self.top_p)  # the first always stays
        return int(tokens[torch.multinomial(shares, 1, generator=rng)])


HALF = "\ufffd"  # what a tokenizer writes for a part of a letter
LONGEST = 8  # tokens that are waited for: more are no letter


class Detokenizer:
    """Spells one run of tokens, piece by piece; `before` is the token that they follow."""

    def __init__(self, tokenizer: Any, before: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.ids = [] if before is None else [before]
        self.spelled = len(self.ids)

    def add(self, token: int) -> str:
        """What can be said once this token has come."""
        self.ids.append(token)
        waiting = len(self.ids) - self.spelled < LONGEST
        return "" if waiting and self._text(self.ids).endswith(HALF) else self.rest()

    def rest(self) -> str:
        """What has not been said yet, finished or not."""
        new = self._text(self.ids)[len(self._text(self.ids[: self.spelled])) :]
        if len(self.ids) > self.spelled:
            self.ids = self.ids[self.spelled :]
            self.spelled = len(self.ids)
        return new

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


ANSWER = "LONGITUDE-ANSWER"


class Chat:
    """The turns of one chat, as text for the model."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the checkpoint's tokenizer has no chat template, so it can't chat: complete "
                "(--complete)."
            )
        self.tokenizer, self.begun = tokenizer, False

    def next(self, said: str) -> str:
        """What to feed for the next thing said, up to where the answer begins. The end of the last
        answer is part of it: it must not have been fed."""
        message = {"role": "user", "content": said}
        if not self.begun:
            self.begun = True
            return self._written([message])
        past = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, found, more = self._written([*past, message]).partition(ANSWER)
        if not found:
            raise UserError(
                "the checkpoint's chat template leaves out earlier answers, so a chat can't go on "
                "turn by turn: complete (--complete)."
            )
        return more

    def _written(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
