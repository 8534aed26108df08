"""The suite `model`: full models under a scheme, against the unpatched model.

The shape is SmolLM2-135M's with fewer layers, and the weights are random. Cases are the prefill of
a full text and one token after a context, by transformers' own code and cache and by ours. A cache
is filled with random keys instead of by a prefill, so that setting up a long context costs no more
than writing it. Decoding excludes cuDNN's attention: it plans anew at every length, which takes ten
times as long as the step itself and would make any other method look fast. On a GPU a token is also
decoded by CUDA graphs (`longitude.hf.cuda_graphs`), beside transformers' static cache, compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.suites.case import Case, Way
from benchmarks.suites.peers import found
from benchmarks.suites.rows import BASELINE, OURS, Work
from benchmarks.suites.setup import Setup, machine
from benchmarks.suites.timing import Run
from longitude.hf import apply, cuda_graphs

STOCK = "transformers, unpatched"
STATIC = "transformers, static cache, compiled"
GRAPHED = "leaky ReRoPE"
ROOM = 64  # tokens that a static cache takes before its length is reset
TOKEN, IN_GRAPHS = 1 / 1.05, 1.0  # minimum speeds, relative to the baseline
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "eos_token_id": None,
}
SCHEMES = {
    "YaRN": "rope(frequencies=yarn(4, original={w}))",
    "leaky ReRoPE": "rope(remap=leaky_rerope({w}, 8))",
    "Self-Extend": "rope(remap=self_extend(8, {w}))",
    "logn": "logn({w})",
}


def cases(setup: Setup) -> Iterator[Case]:
    """Yield prefill and one token at each length; every scheme has its own model, because a cache
    can't be passed from one scheme to another."""
    layers = 8 if setup.cuda else 2
    for n in setup.lengths((32768,), (512,)):
        w = min(4096, n // 4)
        models = {STOCK: _model(setup, layers)}
        for name, text in SCHEMES.items():
            models[f"longitude, {name}"] = model = _model(setup, layers)
            apply(model, text.format(w=w))
        prefills = {m: _prefill(x, n) for m, x in models.items()}
        yield _case(setup, "prefill", n, layers, prefills, 1.0 if n >= 32768 else 0.9)
        tokens = {m: _token(x, n) for m, x in models.items()}
        if setup.cuda:
            tokens[f"longitude, {GRAPHED}, CUDA graphs"] = _graphed(setup, layers, n, w)
        yield _case(setup, "one token", n, layers, tokens, TOKEN)
        if setup.cuda and setup.compiles:
            static = {STATIC: static_token(_model(setup, layers), n)}
            compiled = _graphed(setup, layers, n, w, compiled=True)
            static[f"longitude, {GRAPHED}, CUDA graphs, compiled"] = compiled
            yield _case(setup, "one token, static shapes", n, layers, static, IN_GRAPHS)


def _case(setup: Setup, name: str, n: int, layers: int, runs: dict[str, Run], goal: float) -> Case:
    """The first run is the baseline; `goal` is the speed that the others should have."""
    (stock, run), *ours = runs.items()
    sizes = f"{layers} layers × 9 heads (3 of keys) × {n:,} × 64, {setup.written}"
    work = Work("model", f"full model, {name}", sizes, n, stock, machine(setup.device))
    speed = setup.goal({"speed": goal})
    return Case(work, [Way(stock, run, BASELINE), *(Way(*way, OURS, goal=speed) for way in ours)])


def _model(setup: Setup, layers: int) -> Any:
    config, model = found("transformers", "LlamaConfig", "LlamaForCausalLM")
    torch.manual_seed(0)
    instance = model(config(**SHAPE, num_hidden_layers=layers))
    return instance.to(setup.device, setup.dtype).eval()


def _prefill(model: Any, n: int) -> Run:
    device = next(model.parameters()).device
    tokens = torch.randint(4096, (1, n), generator=torch.Generator().manual_seed(0)).to(device)
    return lambda: model(tokens, use_cache=True, logits_to_keep=1).logits


def _token(model: Any, n: int, *held: Any) -> Run:
    """Decode a token after n others, continuing the cache in each run; `held` is kept alive."""
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    return partial(_step, model, token, n, [], held)


def _graphed(setup: Setup, layers: int, n: int, w: int, compiled: bool = False) -> Run:
    """Decode a token after n others by our CUDA graphs."""
    model, graphs = _model(setup, layers), ExitStack()
    apply(model, SCHEMES[GRAPHED].format(w=w))
    graphs.enter_context(cuda_graphs(model, compiled=compiled))
    return _token(model, n, graphs)


def _step(model: Any, token: Tensor, n: int, kept: list[Any], held: tuple[Any, ...]) -> Tensor:
    if not kept:
        kept.append(model(token, use_cache=True).past_key_values)
        fill(kept[0], n - 1, model)
    with sdpa_kernel(WITHOUT_CUDNN):
        return model(input_ids=token, past_key_values=kept[0], use_cache=True).logits


def static_token(model: Any, n: int) -> Run:
    """Decode a token after n others by transformers' static cache, compiled into CUDA graphs."""
    token, steps = torch.ones(1, 1, dtype=torch.long, device=model.device), count()
    step = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)
    caches: list[Any] = []

    def run() -> Tensor:
        if not caches:
            (static,) = found("transformers", "StaticCache")
            caches.append(static(config=model.config, max_cache_len=n + ROOM))
            model(token, past_key_values=caches[0])
            fill(caches[0], n - 1, model)
        if next(steps) % ROOM == 0:
            for layer in caches[0].layers:
                layer.cumulative_length.fill_(n)
        torch.compiler.cudagraph_mark_step_begin()
        return step(input_ids=token, past_key_values=caches[0], use_cache=True).logits

    return run


def fill(cache: Any, tokens: int, model: Any) -> None:
    """Fill a cache with random keys and values for `tokens` tokens from position 1 on."""
    config, p = model.config, next(model.parameters())
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    for layer in cache.layers:
        k, v = (torch.randn(shape, device=p.device).to(p.dtype) for _ in range(2))
        if hasattr(layer, "store"):
            layer.store.add(k, v, range(1, tokens + 1))
        else:
            layer.update(k, v)
