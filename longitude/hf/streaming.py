"""Endless text at constant memory: the first few tokens and the last window of them are kept.

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM): softmax
has to put its weight somewhere, and models learn to put it on the first tokens; a cache that drops
them collapses, one that keeps four does not. Positions are places in the cache, so no distance
exceeds sinks + window, however much was read. What has left the window is forgotten.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.core.validate import UserError, short, shown
from longitude.hf.generation import (
    Detokenizer,
    Sampling,
    cache_bytes,
    check,
    check_evicts,
    check_model,
    evicts,
    streaming_scheme,
)
from longitude.hf.patch import SchemeLike, own_scheme, patched, scheme_of, trained_length

RECENT = 64  # forwards that the rate is taken over


def stream(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    sinks: int = 4,
    window: int = 1020,
    scheme: SchemeLike | None = None,
) -> Stream:
    """A causal model with rotary positions that reads and writes for as long as it is fed.

    Args:
        tokenizer: for text; without it a stream takes and gives token ids.
        sinks: first tokens that stay visible; 0 shows how a model collapses without them.
        window: last tokens that are visible, the current one among them. Together with the sinks
            no more than the checkpoint was trained to.
        scheme: another scheme that forgets, instead of sinks and window.

    The model is patched until the stream is closed or its `with` block left.
    """
    return Stream(model, tokenizer, sinks=sinks, window=window, scheme=scheme)


class Stream:
    """One sequence that goes on and on."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        sinks: int = 4,
        window: int = 1020,
        scheme: SchemeLike | None = None,
    ) -> None:
        check(sinks, window)
        self.model: Any = model
        self.tokenizer = tokenizer
        check_model(model, sinks + window if scheme is None else None)
        length = trained_length(model) if scheme is not None else sinks + window
        asked = streaming_scheme(sinks, window) if scheme is None else scheme
        changes = not evicts(own_scheme(model))  # a shorter window of its own hides what ours does
        with ExitStack() as stack:
            stack.enter_context(patched(model, asked, length=length, check=changes))
            check_evicts(scheme_of(model))
            self.reset()
            self._try()
            self._open: ExitStack | None = stack.pop_all()

    def reset(self) -> None:
        """Forget everything that was read."""
        from transformers import DynamicCache

        self.tokens = 0  # read and written so far: the next one's position
        self._cache = DynamicCache(config=self.model.config)
        self._said: Tensor | None = None  # logits (1 v) of the next token
        self._last: int | None = None  # the last token
        self._whole = True  # no forward was broken off
        self._times: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def feed(self, text: str | Sequence[int] | Int[Tensor, "*rows n"], chunk: int = 512) -> None:
        """Read text or token ids, `chunk` tokens at a time."""
        for piece in self._pieces(text, chunk):
            self._forward(piece, every=False)

    def score(
        self, text: str | Sequence[int] | Int[Tensor, "*rows n"], chunk: int = 512
    ) -> Float[Tensor, " losses"]:
        """Read, and give the loss (nats) of each token given what was kept of all before it. The
        first token of a stream has none."""
        losses = [torch.empty(0)]
        for piece in self._pieces(text, chunk):
            before = self._said
            said = self._forward(piece, every=True)[:-1].float()
            if before is not None:
                said, heard = torch.cat([before.float(), said]), piece
            else:
                heard = piece[1:]
            losses.append(F.cross_entropy(said, heard.to(said.device), reduction="none").cpu())
        return torch.cat(losses)

    def generate(
        self,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[str]:
        """Write on, as text, piece by piece: `generate_ids`, spelled."""
        if self.tokenizer is None:
            raise UserError(
                "text needs a tokenizer: give stream(model, tokenizer), or generate_ids."
            )
        tokens = self.generate_ids(max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
        return _spelled(Detokenizer(self.tokenizer, self._last), tokens)

    def generate_ids(
        self,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Write on, token by token, up to `max_new_tokens` or until the model ends its text.

        What is given out has been read too, so the stream can be fed on after it; the token that
        ends a text is neither. Temperature 0 takes the likeliest token.
        """
        sampling = Sampling(temperature, top_p, seed)
        self._check_open()
        if self._said is None:
            raise UserError("there is nothing to write on from: feed the stream first.")
        return self._written(max_new_tokens, sampling)

    @property
    def memory(self) -> int:
        """Bytes that the cache holds."""
        return sum(cache_bytes(layer) for layer in self._cache.layers)

    @property
    def rate(self) -> float:
        """Tokens a second, over the last forwards; 0 before the first."""
        seconds = sum(taken for _, taken in self._times)
        return sum(n for n, _ in self._times) / seconds if seconds else 0.0

    def close(self) -> None:
        """Put the model back as it was."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def encode(self, text: str, begins: bool | None = None) -> list[int]:
        """A text's tokens; where the stream begins with it, after the tokenizer's token for that,
        if it wants one. Chat templates have their own: begins=False."""
        if self.tokenizer is None:
            raise UserError("text needs a tokenizer: give stream(model, tokenizer), or token ids.")
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        first = self.tokenizer.bos_token_id
        begins = self.tokens == 0 if begins is None else begins
        if begins and first is not None and ids[:1] != [first]:
            wanted = self.tokenizer(text[:1], verbose=False)["input_ids"]
            return [first, *ids] if wanted[:1] == [first] else ids
        return ids

    def _pieces(self, text: Any, chunk: int) -> tuple[Tensor, ...]:
        self._check_open()
        if chunk < 1:
            raise UserError(f"a chunk is 1 token or more, but got {shown(chunk)}: use 512.")
        ids = torch.as_tensor(self.encode(text) if isinstance(text, str) else text)
        ids = ids.flatten() if ids.dim() != 2 or ids.shape[0] == 1 else ids
        if not ids.numel():
            return ()
        if ids.dim() != 1 or ids.is_floating_point():
            raise UserError(
                f"a stream is one row of token ids, but got {ids.dtype} of shape "
                f"{tuple(ids.shape)}: open one for each."
            )
        known = self.model.get_input_embeddings().num_embeddings
        if int(ids.min()) < 0 or int(ids.max()) >= known:
            raise UserError(
                f"the model knows tokens 0 to {known - 1}, but got {int(ids.min())} to "
                f"{int(ids.max())}: use its own tokenizer."
            )
        return ids.long().split(chunk)

    def _written(self, most: int | None, sampling: Sampling) -> Iterator[int]:
        rng, ends, made = sampling.rng(), self._ends(), 0
        while most is None or made < most:
            assert self._said is not None
            token = sampling.choose(self._said[0], rng)
            if token in ends:
                return
            self._check_open()
            self._forward(torch.tensor([token]), every=False)
            yield token
            made += 1

    def _ends(self) -> set[int]:
        """The tokens that end a text."""
        settings = getattr(self.model, "generation_config", None)
        ends = getattr(settings, "eos_token_id", None)
        found = [getattr(self.tokenizer, "eos_token_id", None)]
        found += ends if isinstance(ends, list) else [ends]
        return {token for token in found if token is not None}

    def _forward(self, ids: Tensor, every: bool) -> Tensor:
        """Read tokens; their logits (n v), or the last one's alone."""
        if not self._whole:
            raise UserError("this stream was broken off in the midst of a forward: reset() it.")
        begun, self._whole = time.perf_counter(), False
        device = self.model.get_input_embeddings().weight.device
        at = torch.arange(self.tokens, self.tokens + len(ids), device=device)
        said = _logits(self.model, ids.to(device)[None], at[None], self._cache, every)
        if said.is_cuda:
            torch.cuda.synchronize(said.device)
        self._whole, self._said, self._last = True, said[-1:], int(ids[-1])
        self.tokens += len(ids)
        self._times.append((len(ids), time.perf_counter() - begun))
        return said

    def _check_open(self) -> None:
        if self._open is None:
            raise UserError("this stream is closed: open another with stream(model).")

    def _try(self) -> None:
        """Read one token, to see that this model gives logits and keeps its keys where they can be
        dropped."""
        from longitude.hf.cache_adapter import REPLACEABLE

        name = type(self.model).__name__
        try:
            self._forward(torch.zeros(1, dtype=torch.long), every=False)
        except UserError:
            raise
        except (TypeError, ValueError) as error:  # a cache or arguments of another kind
            raise UserError(
                f"{name} can't read a text piece by piece ({short(str(error), 120)}): use another "
                f"model."
            ) from error
        if any(type(layer) in REPLACEABLE for layer in self._cache.layers):
            raise UserError(
                f"{name} keeps keys in a form of its own, which a stream can't drop from: use "
                f"another model."
            )
        self.reset()


@torch.no_grad()
def _logits(model: Any, ids: Tensor, at: Tensor, cache: Any, every: bool) -> Tensor:
    few = "logits_to_keep" in inspect.signature(model.forward).parameters and not every
    out = model(
        input_ids=ids,
        position_ids=at,
        past_key_values=cache,
        use_cache=True,
        **({"logits_to_keep": 1} if few else {}),
    )
    if getattr(out, "logits", None) is None:
        raise UserError(f"{type(model).__name__} predicts no tokens: load it with its head.")
    return out.logits[0]


def _spelled(speller: Detokenizer, tokens: Iterator[int]) -> Iterator[str]:
    for token in tokens:
        if piece := speller.add(token):
            yield piece
    if piece := speller.rest():
        yield piece
