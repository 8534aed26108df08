"""Decoding by CUDA graphs gives the tokens and logits of decoding without."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import longitude.hf as lh
from longitude.cache import Cache
from longitude.core.part import as_rows
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf import decode_graph
from tests.hf.tiny import decoder, ids

REMAP = "rope(remap=rerope(24))"


def test_a_model_that_no_graph_serves_is_refused():
    model = decoder("llama")
    with pytest.raises(UserError, match="patch it first"), lh.cuda_graphs(model):
        pass
    with lh.patched(model, REMAP, check=False):
        with pytest.raises(UserError, match="the model is on cpu"), lh.cuda_graphs(model):
            pass


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # of torch's own compiler
@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", {"num_hidden_layers": 6}), ("gpt_neox", {"num_hidden_layers": 6}),
     ("gemma3_text", {})],
)  # fmt: skip
def test_layers_are_compiled_but_for_their_attention(kind, more, monkeypatch):
    graphs, compile = [], torch.compile

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(compile, backend=backend))
    torch._dynamo.reset()
    model, prompt, token = decoder(kind, **more), ids(30), ids(1, seed=3)
    layer = next(
        x for x in model.modules() if type(x).__name__.endswith(("DecoderLayer", "NeoXLayer"))
    )
    attention = next(x for x in layer.children() if type(x).__name__.endswith("Attention"))
    with lh.patched(model, REMAP, check=False), torch.no_grad():
        caches = [model(prompt, use_cache=True).past_key_values for _ in range(2)]
        expected = model(token, past_key_values=caches[0]).logits
        with decode_graph._compiled(model):
            found = model(token, past_key_values=caches[1]).logits
    assert torch.equal(found, expected)
    assert 0 < len(graphs) <= 4
    assert not any(name in graph for name in ("q_proj", "query_key_value") for graph in graphs)
    assert "forward" not in vars(layer) and "forward" not in vars(attention)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
def test_layers_that_do_not_compile_are_one_sentence(monkeypatch):
    def backend(graph, _):
        raise ValueError("no such instruction")

    model = decoder("llama")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    wrong = r"can't compile the layers of LlamaForCausalLM \(.*no such instruction"
    with lh.patched(model, REMAP, check=False), pytest.raises(UserError, match=wrong):
        with torch.no_grad(), decode_graph._compiled(model):
            model(ids(1))
    layer = model.model.layers[0]
    assert "forward" not in vars(layer) and "forward" not in vars(layer.self_attn)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
def test_layers_stay_compiled_for_any_number_of_sequences_and_models(monkeypatch):
    ran, compile = [], torch.compile

    def backend(graph, _):
        return lambda *given: ran.append(graph) or graph(*given)

    monkeypatch.setattr(torch, "compile", partial(compile, backend=backend))
    torch._dynamo.reset()
    for seed in range(10):
        model = decoder("llama", intermediate_size=64 + 8 * seed)  # compiled anew
        with lh.patched(model, REMAP, check=False), torch.no_grad():
            for rows in (1, 2, 3 + seed):
                ran.clear()
                with decode_graph._compiled(model):
                    model(ids(1, rows=rows))
                assert len(ran) == 2 * len(model.model.layers), (seed, rows)


@pytest.mark.parametrize("scheme", [REMAP, "rope(remap=streaming(2, 12))"])
def test_what_is_written_to_a_slot_is_what_is_added(scheme):
    scheme, gen = parse(scheme), torch.Generator().manual_seed(0)
    added, written, slots = Cache(scheme), Cache(scheme), 0
    for n in range(90):
        count = 20 if n == 0 else 1
        k, v = torch.randn(2, 1, 3, count, 8, generator=gen)
        first = added.seen
        pos = range(first, first + count)
        room = written.next_position
        if room is not None:
            assert room == first
            where, ahead = written.where, written.keys.lines_with(pos)
            written.advance(pos)
            assert written.keys.lines == ahead  # what the step was planned for beforehand
            written.slot = torch.tensor([len(written) - 1])
            slots += 1
        written.add(k, v, pos)
        written.slot = None
        added.add(k, v, pos)
        if room is not None:
            assert written.where == where
        assert written.seen == added.seen and written.keys.lines == added.keys.lines
        for a, b in ((added.keys.buffer, written.keys.buffer), (added.values, written.values)):
            assert torch.equal(a.view(), b.view())
        assert torch.equal(as_rows(added.positions), as_rows(written.positions))
    assert slots > 80


def test_the_state_of_a_cache_tells_every_change():
    cache, gen = Cache(parse(REMAP)), torch.Generator().manual_seed(0)

    def add(count: int) -> None:
        k, v = torch.randn(2, 1, 3, count, 8, generator=gen)
        cache.add(k, v, range(cache.seen, cache.seen + count))

    add(20)
    add(1)  # moves to memory with room
    changes = [
        lambda: add(1), lambda: cache.crop(cache.seen - 1),
        lambda: cache.advance(range(cache.seen, cache.seen + 1)),
        lambda: cache.reorder(torch.tensor([0])), cache.reset,
    ]  # fmt: skip
    for change in changes:
        before = cache.state
        assert all(a is b for a, b in zip(before, cache.state, strict=True))
        change()
        assert any(a is not b for a, b in zip(before, cache.state, strict=True))


@pytest.mark.accelerator
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "scheme",
    [REMAP, "rope(remap=leaky_rerope(24, 4))", "rope(remap=self_extend(4, 16))",
     "rope(remap=dual_chunk(48, 16))", "rope(remap=streaming(2, 40))", "window(40)",
     "rope(base=500) + window(1000)", "logn(20)", "split(streaming(2, 40), rerope(24), share=0.5)"],
)  # fmt: skip
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_give_the_same_tokens(kind, scheme, compiled):
    model = decoder(kind).to("cuda")
    for rows in (1, 3):
        prompt = ids(30, rows=1).expand(rows, -1).to("cuda")
        how = {"max_new_tokens": 220, "do_sample": False, "eos_token_id": None,
               "return_dict_in_generate": True, "output_logits": True}  # fmt: skip
        with lh.patched(model, scheme, check=False):
            expected = model.generate(prompt, **how)
            with lh.cuda_graphs(model, compiled=compiled) as graphs:
                found = model.generate(prompt, **how)
        assert graphs.replayed > 150 and graphs.captured < 25
        assert torch.equal(found.sequences, expected.sequences)
        for a, b in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    assert "forward" not in vars(model)


@pytest.mark.accelerator
def test_what_no_graph_takes_runs_as_without():
    model, prompt = decoder("llama").to("cuda"), ids(30, rows=2).to("cuda")
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0  # padding
    how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    for scheme, more in ((REMAP, {"attention_mask": mask}), (REMAP, {"num_beams": 3}),
                         ("rope(fraction=0.5) + logn(20)", {})):  # fmt: skip
        with lh.patched(model, scheme, check=False, force=True):
            expected = model.generate(prompt, **how, **more)
            with lh.cuda_graphs(model) as graphs:
                assert torch.equal(model.generate(prompt, **how, **more), expected)
        assert graphs.replayed == 0, scheme


@pytest.mark.accelerator
def test_a_stream_decodes_by_graphs():
    model, prompt = decoder("llama").to("cuda"), ids(30).to("cuda")
    scheme = "rope(remap=streaming(2, 40))"
    with lh.patched(model, scheme, check=False):
        how = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None}
        expected = model.generate(prompt, **how)[0, 30:].tolist()
    model.generation_config.eos_token_id = None
    with lh.stream(model, scheme=scheme) as stream, lh.cuda_graphs(model) as graphs:
        stream.feed(prompt[0].cpu())
        assert [*stream.generate_ids(200)] == expected
    assert graphs.replayed > 150
