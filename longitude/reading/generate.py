"""transformers' own `generate` over tokens that come from elsewhere than one forward.

What a text over many windows says next is made of several forwards, with caches of their own. To
`generate` it is a model without a cache: a shallow copy of the real one, with its settings and
its end tokens, whose forward asks a `Source`. So sampling, processors, stopping and streamers are
transformers' own, in every version, and the real model is not touched. Beams and several answers at
once would need as many caches, assistants more logits: they are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.core.validate import UserError, shown

DRAWS = ("temperature", "top_p", "top_k")
# what would ask for several rows, or for more logits than the last token's, and what leaves it out
ONE_ROW = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "assistant_model": None,
    "prompt_lookup_num_tokens": None,
    "guidance_scale": None,
}


@runtime_checkable
class Source(Protocol):
    """What says the next token."""

    def first(self) -> Float[Tensor, " v"]:
        """The logits after all that was read."""
        ...

    def next(self, token: int) -> Float[Tensor, " v"]:
        """Those after one token more."""
        ...


@torch.no_grad()
def generated(
    model: nn.Module,
    source: Source,
    prompt: list[int],
    tell: Callable[[int], None] | None = None,
    **options: Any,
) -> list[int]:
    """The tokens that `generate` makes of a source's logits.

    Args:
        prompt: the last tokens that the source has read: what processors see before the answer.
        tell: called with each token as it comes.
        options: `generate`'s own. Without a word about sampling, the likeliest token is taken.
    """
    _check(options)
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    pad = getattr(settings, "pad_token_id", None)
    options = {"do_sample": False, "pad_token_id": ends[0] if pad is None else pad} | options
    if not options["do_sample"]:  # a checkpoint's own settings for draws would be warned of
        options = dict.fromkeys(DRAWS) | options
    streamer = _Streamer(tell, options.pop("streamer", None))
    place = model.get_input_embeddings().weight.device  # type: ignore[operator, union-attr]
    ids = torch.tensor([prompt], device=place)
    shell = _shell(model, source, len(prompt))
    out = shell.generate(input_ids=ids, streamer=streamer, use_cache=False, **options)
    out = out if isinstance(out, Tensor) else out.sequences
    return out[0, len(prompt) :].tolist()


def _check(options: dict[str, Any]) -> None:
    for name, none in ONE_ROW.items():
        if options.get(name, none) not in (none, None):
            raise UserError(
                f"an answer over several windows is one row, token by token, but got {name}="
                f"{shown(options[name])}: leave it out."
            )


def _shell(model: Any, source: Source, read: int) -> Any:
    """The model as `generate` sees it."""
    from transformers.modeling_outputs import CausalLMOutput

    state: dict[str, Any] = {"read": read, "said": None}

    def forward(input_ids: Tensor, return_dict: bool = True) -> Any:
        if state["said"] is None:
            state["said"] = source.first()
        for token in input_ids[0, state["read"] :].tolist():
            state["said"], state["read"] = source.next(token), state["read"] + 1
        return CausalLMOutput(logits=state["said"][None, None])  # type: ignore[arg-type]

    def prepare(input_ids: Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    shell = copy.copy(model)
    vars(shell).update(forward=forward, prepare_inputs_for_generation=prepare)
    return shell


class _Streamer:
    """Hands tokens on, one by one; the prompt comes first and is nobody's answer."""

    def __init__(self, tell: Callable[[int], None] | None, other: Any) -> None:
        self.tell, self.other, self.begun = tell, other, False

    def put(self, value: Tensor) -> None:
        if self.begun and self.tell is not None:
            for token in value.flatten().tolist():
                self.tell(token)
        self.begun = True
        if self.other is not None:
            self.other.put(value)

    def end(self) -> None:
        if self.other is not None:
            self.other.end()
