"""Tiny random models without rotation, and what every family is asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import longitude
from longitude import Scheme, parse
from longitude.eval.perplexity import tail, token_losses
from longitude.hf.families import Family, family_of

WINDOW, VOCABULARY = 16, 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OFFSET = {"pad_token_id": 1, "max_position_embeddings": WINDOW + 2, "bos_token_id": 0}
TABLES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": OFFSET,
    "gpt2": {"use_cache": True},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "distilbert": {"dim": 32, "n_heads": 4, "hidden_dim": 48},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "camembert": OFFSET,
    "biogpt": {},
    "gpt_bigcode": {},
}


def tiny(kind: str, head: str = "AutoModel", attention: str | None = None, **entries: Any) -> Any:
    """A model of random weights that are large enough for every one to matter."""
    import transformers

    given = SHAPE | TABLES.get(kind, {}) | entries
    config = transformers.AutoConfig.for_model(kind, **given)
    torch.manual_seed(0)
    make = getattr(transformers, head).from_config
    with warnings.catch_warnings():  # DeBERTa and GPT-BigCode call torch.jit.script when imported
        warnings.simplefilter("ignore", DeprecationWarning)
        model = make(config, attn_implementation=attention).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def family(model: Any) -> Family:
    found = family_of(model)
    assert found is not None
    return found


def under(model: Any, text: str | None, **options: Any) -> Any:
    """The model patched with a text, or as it is."""
    if text is None:
        return nullcontext()
    return family(model).patch(model, parse(text), **options)


def own(model: Any) -> Scheme:
    return family(model).scheme(model)


def tokens(n: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Tokens, none of them special."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (batch, n), generator=rng)


def out(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """Logits, or the last hidden state."""
    with torch.no_grad():
        made = model(input_ids=ids, **inputs)
    return made.logits if hasattr(made, "logits") else made[0]


def restored(model: Any, text: str, run: Callable[[], Tensor]) -> None:
    """Leaving a patch gives the model back bit for bit, after an exception too."""
    before, held = run(), state(model)
    for error in (None, RuntimeError):
        try:
            with under(model, text):
                assert not torch.equal(run(), before)
                if error:
                    raise error
        except RuntimeError:
            pass
        assert torch.equal(run(), before)
        assert state(model) == held


def state(model: Any) -> list[Any]:
    """Everything a patch might leave behind: classes, hooks, buffers, attributes, weights."""
    return [
        (
            name,
            type(module),
            sorted(vars(module)),
            list(vars(module)["_forward_pre_hooks"]),
            {key: id(buffer) for key, buffer in module.named_buffers(recurse=False)},
            {key: id(weight) for key, weight in module.named_parameters(recurse=False)},
        )
        for name, module in model.named_modules()
    ]


def decoded(model: Any, ids: Tensor, prompt: int) -> Tensor:
    """Logits token by token, after a prompt, with the model's own cache."""
    with torch.no_grad():
        made = model(input_ids=ids[:, :prompt], use_cache=True)
        parts = [made.logits]
        for t in range(prompt, ids.shape[1]):
            made = model(
                input_ids=ids[:, t : t + 1], past_key_values=made.past_key_values, use_cache=True
            )
            parts.append(made.logits)
    return torch.cat(parts, 1)


def padded_pair(n: int, short: int) -> tuple[Tensor, Tensor]:
    """Two rows of n and of `short` tokens, the second padded on the left, and their mask."""
    ids = tokens(n, batch=2)
    mask = torch.ones_like(ids)
    ids[1, : n - short], mask[1, : n - short] = 0, 0
    return ids, mask


def asset(name: str) -> Any:
    """One of the project's own tiny checkpoints, in float32."""
    import transformers

    folder = Path(longitude.__file__).parent / "assets" / name
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tail_loss(model: Any, n: int, last: int = 128) -> float:
    """The loss of the last bytes of a text of n bytes that the checkpoints never saw."""
    text = (Path(longitude.__file__).parent / "core" / "scheme.py").read_bytes()
    rows = torch.tensor([list(text[end - n : end]) for end in (2048, 3072, 4096, 5120)])
    losses = token_losses(lambda ids: model(ids).logits, rows)
    return tail(losses, last)
