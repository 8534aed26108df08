"""Endless text at constant memory: attention sinks and a sliding window.

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM),
arXiv:2309.17453: softmax has to put its weight somewhere, and models learn to put it on the first
tokens; with a cache that evicts them the model collapses, with one that keeps four it does not.
Positions are slots in the cache, so no distance exceeds sinks + window, however much was read. What
has left the window is forgotten.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, short, shown
from longitude.hf.generation import Detokenizer, Sampling
from longitude.hf.patch import SchemeLike, own_scheme, patch_of, patched, scheme_of, trained_length
from longitude.hf.probe import rotary_owners
from longitude.parts import Window

RECENT = 64  # forwards over which the rate is measured
FAR = 2**40  # a position that no text reaches
Ids = str | Sequence[int] | Int[Tensor, "*rows n"]


def stream(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    sinks: int = 4,
    window: int = 1020,
    scheme: SchemeLike | None = None,
) -> Stream:
    """Open a stream, on which a causal model with rotary positions reads and writes without end.

    Args:
        tokenizer: for text; without it a stream takes and gives token ids.
        sinks: first tokens that stay visible; 0 shows how a model collapses without them.
        window: last tokens that are visible, the current one among them. Together with the sinks
            no more than the checkpoint was trained to.
        scheme: another scheme that evicts, instead of sinks and window.

    The model is patched until the stream is closed or its `with` block left.
    """
    check(sinks, window)
    patch_of(model)  # raises if this is not a model
    name, config, trained = type(model).__name__, cast(Any, model.config), trained_length(model)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"a stream is one text that goes on, but {name} reads one and writes another: use a "
            f"decoder."
        )
    if not rotary_owners(model):
        raise UserError(
            f"a stream gives tokens new positions as others leave, which takes rotary ones that "
            f"longitude can patch, and {name} has none: use a RoPE model such as a Llama."
        )
    if scheme is not None:
        return Stream(model, tokenizer, scheme, trained)
    if trained is not None and sinks + window > trained:
        raise UserError(
            f"sinks and window are {sinks + window} positions, but the checkpoint was trained to "
            f"{trained}: let them be {trained} together at most."
        )
    texts, own = [], own_scheme(model).schemes
    for layer in own:
        near = min([window, *(m.size for m in layer.mask if isinstance(m, Window))])
        # the mask shows the same as the remap, for layers without a rotation to remap
        text = f"rope(remap=streaming({sinks}, {near})) + window({near}, {sinks})"
        texts.append(text if sinks else f"rope() + window({near})")
    windowed = any(layer.windowed for layer in own)  # they keep their mask unless named
    scheme = f"layers({', '.join(texts)})" if windowed else texts[0]
    return Stream(model, tokenizer, scheme, sinks + window)


def check(sinks: int, window: int) -> None:
    """Raise if these are impossible for any model."""
    if sinks < 0:
        raise UserError(f"sinks are 0 or more first tokens, but got {shown(sinks)}: use 4.")
    if window < 1:
        raise UserError(f"a window is 1 token or more, but got {shown(window)}: use 1020.")


def evicts(scheme: Scheme | Layers) -> bool:
    """Whether in every layer all tokens but the first ones eventually become invisible."""
    query, key = torch.tensor([[FAR]]), torch.tensor([[FAR // 2]])
    areas = [area for layer in scheme.schemes for area in layer.areas()]
    return not any(bool(area.ever(query, key)) for area in areas)


class Stream:
    """One sequence without end, under a scheme that evicts; `stream` opens it."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, scheme: SchemeLike, length: int | None
    ) -> None:
        from longitude.hf.cache_adapter import REPLACEABLE

        self.model: Any = model
        self.tokenizer = tokenizer
        changes = not evicts(own_scheme(model))  # a model that evicts already may not change
        with ExitStack() as stack:
            stack.enter_context(patched(model, scheme, length=length, check=changes))
            for each in scheme_of(model).schemes:
                if not each.causal:
                    raise UserError(
                        f"a stream reads forwards, but {shown(each)} sees ahead: use a decoder."
                    )
                if not evicts(each):
                    raise UserError(
                        f"{shown(each)} keeps every token in sight, so its memory would grow "
                        f"without end: add window(…), or leave the scheme out."
                    )
            self.reset()
            name = type(model).__name__
            try:  # check on one token that this model returns logits and that its cache can evict
                self._forward(torch.zeros(1, dtype=torch.long), every=False)
            except (TypeError, ValueError) as error:  # a cache or arguments of another kind
                if isinstance(error, UserError):
                    raise
                raise UserError(
                    f"{name} can't read a text piece by piece ({short(str(error), 120)}): use "
                    f"another model."
                ) from error
            if any(type(layer) in REPLACEABLE for layer in self._cache.layers):
                raise UserError(
                    f"{name} caches keys in a form of its own, from which a stream can't evict: "
                    f"use another model."
                )
            self.reset()
            self._open: ExitStack | None = stack.pop_all()

    def reset(self) -> None:
        """Forget everything that was read."""
        from transformers import DynamicCache

        self.tokens = 0  # number read and written so far: the position of the next one
        self._cache = DynamicCache(config=self.model.config)
        self._logits: Tensor | None = None  # (1 v), of the next token
        self._last: int | None = None  # the last token that was read
        self._intact = True  # whether no forward was interrupted
        self._times: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def feed(self, text: Ids, chunk: int = 512) -> None:
        """Read text or token ids, `chunk` tokens at a time."""
        for ids in self._chunks(text, chunk):
            self._forward(ids, every=False)

    def score(self, text: Ids, chunk: int = 512) -> Float[Tensor, " losses"]:
        """Read a text, and return the loss (nats) of each token given what the cache still has of
        the text before it. The first token of a stream has none."""
        losses = [torch.empty(0)]
        for ids in self._chunks(text, chunk):
            previous = self._logits
            logits = self._forward(ids, every=True)[:-1].float()
            if previous is None:
                ids = ids[1:]
            else:
                logits = torch.cat([previous.float(), logits])
            losses.append(F.cross_entropy(logits, ids.to(logits.device), reduction="none").cpu())
        return torch.cat(losses)

    def generate(self, max_new_tokens: int | None = None, **sampling: Any) -> Iterator[str]:
        """Continue the text piece by piece: `generate_ids`, detokenized."""
        if self.tokenizer is None:
            raise UserError(
                "text needs a tokenizer: give stream(model, tokenizer), or generate_ids."
            )
        tokens = self.generate_ids(max_new_tokens, **sampling)
        detokenizer = Detokenizer(self.tokenizer, self._last)

        def pieces() -> Iterator[str]:
            yield from filter(None, map(detokenizer.add, tokens))
            yield from filter(None, [detokenizer.rest()])

        return pieces()

    def generate_ids(
        self,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Continue token by token, up to `max_new_tokens` or until the model ends its text.

        Returned tokens have been read too, so more can be fed after them; the token that ends a
        text is neither returned nor read. Temperature 0 takes the most likely token.
        """
        sampling = Sampling(temperature, top_p, seed)
        self._check_open()
        if self._logits is None:
            raise UserError("there is nothing to write on from: feed the stream first.")
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ends = {*(ends if isinstance(ends, list) else [ends])}
        ends.add(getattr(self.tokenizer, "eos_token_id", None))

        def tokens() -> Iterator[int]:
            rng = sampling.rng()
            for _ in count() if max_new_tokens is None else range(max_new_tokens):
                assert self._logits is not None
                token = sampling.choose(self._logits[0], rng)
                if token in ends:
                    return
                self._check_open()
                self._forward(torch.tensor([token]), every=False)
                yield token

        return tokens()

    @property
    def memory(self) -> int:
        """The size of the cache in bytes."""
        stores = [(layer, getattr(layer, "store", None)) for layer in self._cache.layers]
        return sum(_nbytes(vars(x)) if store is None else store.nbytes for x, store in stores)

    @property
    def rate(self) -> float:
        """Tokens per second, over the last forwards; 0 before the first."""
        seconds = sum(taken for _, taken in self._times)
        return sum(n for n, _ in self._times) / seconds if seconds else 0.0

    def close(self) -> None:
        """Restore the model."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def encode(self, text: str, begins: bool | None = None) -> list[int]:
        """Return a text's tokens, with a BOS token at the beginning of the stream if the tokenizer
        uses one. Chat templates have their own: begins=False."""
        if self.tokenizer is None:
            raise UserError("text needs a tokenizer: give stream(model, tokenizer), or token ids.")
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        begins = self.tokens == 0 if begins is None else begins
        if begins and bos is not None and ids[:1] != [bos]:
            with_special = self.tokenizer(text[:1], verbose=False)["input_ids"]
            return [bos, *ids] if with_special[:1] == [bos] else ids
        return ids

    def _chunks(self, text: Any, chunk: int) -> tuple[Tensor, ...]:
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

    @torch.no_grad()
    def _forward(self, ids: Tensor, every: bool) -> Tensor:
        """Read tokens; return their logits (n v), or only the last token's unless `every`."""
        if not self._intact:
            raise UserError("a forward of this stream was interrupted: call reset().")
        start, self._intact = time.perf_counter(), False
        device = self.model.get_input_embeddings().weight.device
        can_skip = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        out = self.model(
            input_ids=ids.to(device)[None],
            position_ids=torch.arange(self.tokens, self.tokens + len(ids), device=device)[None],
            past_key_values=self._cache,
            use_cache=True,
            **({"logits_to_keep": 1} if can_skip and not every else {}),
        )
        if getattr(out, "logits", None) is None:
            raise UserError(
                f"{type(self.model).__name__} predicts no tokens: load it with its head."
            )
        logits = out.logits[0]
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self._intact, self._logits, self._last = True, logits[-1:], int(ids[-1])
        self.tokens += len(ids)
        self._times.append((len(ids), time.perf_counter() - start))
        return logits

    def _check_open(self) -> None:
        if self._open is None:
            raise UserError("this stream is closed: open another with stream(model).")


def _nbytes(value: Any) -> int:
    """The bytes of all tensors in nested lists and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return value.nbytes if isinstance(value, Tensor) else 0
