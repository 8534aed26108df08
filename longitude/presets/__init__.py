"""Presets: each named method of the literature as a function that returns its scheme.

A preset is written like a part: `parse("streaming_llm(4, 1020)")`. Joined with parts by +, it adds
to them.
"""

import math
from typing import Literal

from longitude import parts
from longitude.core.scheme import PAPERS, PRESETS, Layers, Scheme, Split, preset, scheme_of
from longitude.core.validate import UserError
from longitude.presets.remaps import *  # noqa: F403


@preset("Vaswani et al. 2017, arXiv:1706.03762")
def vaswani() -> Scheme:
    """Sinusoidal positions, decoder."""
    return Scheme.of(parts.Sinusoidal())


@preset("Devlin et al. 2018, arXiv:1810.04805")
def bert(length: int = 512) -> Scheme:
    """Learned positions, bidirectional: BERT; also ALBERT and ERNIE."""
    return Scheme.of(parts.Learned(length), parts.Bidirectional())


@preset("Radford et al. 2019; Brown et al. 2020, arXiv:2005.14165")
def gpt2(length: int = 1024) -> Scheme:
    """Learned positions, causal: GPT-2; GPT-3 with 2048."""
    return Scheme.of(parts.Learned(length))


@preset("Liu et al. 2019, arXiv:1907.11692")
def roberta(length: int = 512) -> Scheme:
    """Learned positions that start at row 2, bidirectional."""
    return Scheme.of(parts.Learned(length, offset=2), parts.Bidirectional())


@preset("Su 2020, kexue.fm/archives/7947")
def hierarchical_bert(length: int = 512, alpha: float = 0.4) -> Scheme:
    """A BERT whose table of n rows reaches n² positions."""
    return Scheme.of(parts.Hierarchical(length, alpha), parts.Bidirectional())


@preset("Zhu et al. 2024, arXiv:2404.12096")
def interpolated_bert(length: int = 512, factor: float = 4) -> Scheme:
    """A BERT whose table is interpolated between its rows."""
    return Scheme.of(parts.LearnedInterpolated(length, factor), parts.Bidirectional())


@preset("Beltagy et al. 2020, arXiv:2004.05150")
def tiled_bert(length: int = 512) -> Scheme:
    """A BERT whose table repeats, as in Longformer's initialisation."""
    return Scheme.of(parts.LearnedTiled(length), parts.Bidirectional())


@preset("Liu et al. 2020, arXiv:2003.09229")
def floater_transformer() -> Scheme:
    """Positions from a flow, at the input only."""
    return Scheme.of(parts.Floater())


@preset("Su 2021, kexue.fm/archives/8130")
def multiplied(length: int = 512) -> Scheme:
    """Learned positions multiplied into the embeddings."""
    return Scheme.of(parts.Multiplicative(length))


@preset("Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466")
def nope() -> Scheme:
    """No positions at all: the causal mask alone."""
    return Scheme.of()


@preset("Gelberg et al. 2025, arXiv:2512.12167")
def drope_llama(train: int = 4096, c: float = 0.103) -> Scheme:
    """A model trained with RoPE, then without it; its logits are scaled up past its window."""
    return Scheme.of(parts.Drope(train, c))


@preset("Shaw et al. 2018, arXiv:1803.02155")
def shaw_encoder(clip: int = 16, values: bool = True) -> Scheme:
    """Clipped relative vectors on keys and values, bidirectional."""
    return Scheme.of(parts.Shaw(clip, values), parts.Bidirectional())


@preset("Shaw et al. 2018, arXiv:1803.02155")
def shaw_decoder(clip: int = 16) -> Scheme:
    """Clipped relative vectors on keys, causal."""
    return Scheme.of(parts.Shaw(clip))


@preset("Dai et al. 2019, arXiv:1901.02860")
def transformer_xl_lm() -> Scheme:
    """Transformer-XL's relative attention, causal."""
    return Scheme.of(parts.TransformerXl())


@preset("Yang et al. 2019, arXiv:1906.08237")
def xlnet() -> Scheme:
    """Transformer-XL's relative attention in both directions."""
    return Scheme.of(parts.TransformerXl(), parts.Bidirectional())


@preset("Raffel et al. 2019, arXiv:1910.10683")
def t5_encoder() -> Scheme:
    """Bucketed biases, half of the buckets per side. T5's own scores have no 1/√d: scale=1.0."""
    return Scheme.of(parts.T5(bidirectional=True), parts.Bidirectional())


@preset("Raffel et al. 2019, arXiv:1910.10683")
def t5_decoder() -> Scheme:
    """Bucketed biases, causal."""
    return Scheme.of(parts.T5())


@preset("He et al. 2020, arXiv:2006.03654")
def deberta_v1() -> Scheme:
    """Disentangled attention with 512 distances per side."""
    return Scheme.of(parts.Deberta(512), parts.Bidirectional())


@preset("He et al. 2021, arXiv:2111.09543")
def deberta_v3() -> Scheme:
    """Disentangled attention with 256 log-spaced buckets."""
    return Scheme.of(parts.Deberta(512, buckets=256), parts.Bidirectional())


@preset("Lin et al. 2025, arXiv:2503.02130")
def fox(gate: Literal["full", "bias", "fixed"] = "full") -> Scheme:
    """The Forgetting Transformer: gates that read the layer's input, and no other positions."""
    return Scheme.of(parts.Forget(gate))


@preset("Press et al. 2021, arXiv:2108.12409")
def alibi_lm() -> Scheme:
    """Linear biases, causal: BLOOM, MPT, Baichuan-13B, Falcon-RW."""
    return Scheme.of(parts.Alibi())


@preset("Press et al. 2021, arXiv:2108.12409 (bidirectional use)")
def alibi_encoder(future: float = 1, offset: float = 0.5) -> Scheme:
    """Linear biases in both directions, keys ahead half a step further away."""
    return Scheme.of(parts.Alibi(future, offset), parts.Bidirectional())


@preset("Al-Khateeb et al. 2023, arXiv:2310.13017")
def alibi_pi(factor: float = 4) -> Scheme:
    """An extended ALiBi model: slopes divided by the factor."""
    return Scheme.of(parts.AlibiInterpolated(factor))


@preset("keezen 2023, github.com/keezen/ntk_alibi")
def alibi_ntk(factor: float = 4) -> Scheme:
    """An extended ALiBi model: the shallow slopes divided most."""
    return Scheme.of(parts.NtkAlibi(factor))


@preset("Chi et al. 2022, arXiv:2205.09921")
def kerple(kind: Literal["log", "power"] = "log") -> Scheme:
    """Learned distance kernels, logarithmic or power."""
    return Scheme.of(parts.KerplePower() if kind == "power" else parts.KerpleLog())


@preset("Li et al. 2023, arXiv:2310.04418")
def fire_lm() -> Scheme:
    """A learned function of the distance relative to the query's position."""
    return Scheme.of(parts.Fire())


@preset("Chi et al. 2022, arXiv:2212.10356")
def sandwich_lm() -> Scheme:
    """Inner products of sinusoidal positions as a bias."""
    return Scheme.of(parts.Sandwich())


@preset("Su 2021, kexue.fm/archives/8823")
def entropy_invariant(train: int = 512) -> Scheme:
    """RoPE with logn, for models trained with it."""
    return Scheme.of(parts.Rope(), parts.LogN(train, clip=False))


@preset("Nakanishi 2025, arXiv:2501.19399")
def scalable_softmax() -> Scheme:
    """RoPE with a learned factor on ln n."""
    return Scheme.of(parts.Rope(), parts.SsMax())


@preset("Jiang et al. 2023, arXiv:2310.06825; Beltagy et al. 2020, arXiv:2004.05150")
def mistral(window: int = 4096) -> Scheme:
    """RoPE under a sliding window."""
    return Scheme.of(parts.Rope(), parts.Window(window))


@preset("Su 2023, kexue.fm/archives/9603")
def hwfa(train: int = 512, layers: int = 24, window: int = 16) -> Layers:
    """Window layers with RoPE, then one full-attention layer without positions, with logn."""
    if not 2 <= layers <= 1000:
        raise UserError(f"hwfa: layers must be 2 to 1000, but got {layers}: 24 is the post's.")
    local = Scheme.of(parts.Rope(), parts.Window(window))
    return Layers((*[local] * (layers - 1), Scheme.of(parts.LogN(train, clip=False))))


@preset("Yang et al. 2025, arXiv:2501.18795")
def rnope_swa(window: int = 4096, base: float = 10000) -> Layers:
    """Three RoPE layers with a window, then one full-attention layer without positions: Command-A,
    Command R7B and EXAONE 4."""
    local = Scheme.of(parts.Rope(base), parts.Window(window))
    return Layers((local, local, local, Scheme.of()))


@preset("Puvvada et al. 2025, arXiv:2504.08719")
def swan(train: int = 8192, window: int = 512, base: float = 10000) -> Layers:
    """One full-attention layer without positions, scaled by the logarithm of the position, then
    three RoPE layers with a window."""
    local = Scheme.of(parts.Rope(base), parts.Window(window))
    return Layers((Scheme.of(parts.LogPosition(train)), local, local, local))


@preset("Meta 2025, Llama 4")
def llama4(base: float = 500_000, chunk: int = 8192) -> Layers:
    """iRoPE: three RoPE layers that attend within chunks, then one without positions, with a
    temperature that depends on the position."""
    local = Scheme.of(parts.Rope(base, pairs="adjacent"), parts.Chunked(chunk))
    return Layers((local, local, local, Scheme.of(parts.Llama4Temperature(chunk))))


@preset("Gemma Team 2025, arXiv:2503.19786")
def gemma3(window: int = 1024, factor: float = 8) -> Layers:
    """Five local layers at base 10,000, then a global one at 1,000,000, interpolated."""
    local = Scheme.of(parts.Rope(), parts.Window(window))
    far = Scheme.of(parts.Rope(1_000_000, frequencies=parts.Linear(factor)))
    return Layers((*[local] * 5, far))


@preset("Longitude")
def split(
    near: Scheme = scheme_of(parts.Streaming(4, 2044)),  # noqa: B008 (a scheme is frozen)
    far: Scheme = scheme_of(parts.Rerope(512)),  # noqa: B008
    share: float = 0.5,
) -> Layers:
    """The first share of a model's layers runs one scheme, the rest another: by default a window
    with sinks, then a narrow ReRoPE."""
    return Split((near, far), share)


@preset("Su et al. 2021, arXiv:2104.09864")
def roformer() -> Scheme:
    """RoPE as published: adjacent pairs, bidirectional."""
    return Scheme.of(parts.Rope(pairs="adjacent"), parts.Bidirectional())


@preset("Touvron et al. 2023, arXiv:2302.13971")
def llama(base: float = 10000) -> Scheme:
    """RoPE in half pairs: Llama 1 and 2, Qwen, Mistral, SmolLM2 and most others."""
    return Scheme.of(parts.Rope(base))


@preset("Rozière et al. 2023, arXiv:2308.12950; Liu et al. 2023, arXiv:2310.05209 (scaling laws)")
def code_llama(base: float = 1_000_000) -> Scheme:
    """Adjusted base frequency: a larger base, for models fine-tuned with it."""
    return Scheme.of(parts.Rope(base))


@preset("Black et al. 2022, arXiv:2204.06745")
def gpt_neox(fraction: float = 0.25) -> Scheme:
    """Partial rotary: a quarter of each head is rotated."""
    return Scheme.of(parts.Rope(fraction=fraction))


@preset("Gopalakrishnan et al. 2025, arXiv:2509.10534")
def pope(base: float = 10000) -> Scheme:
    """Polar positions: a magnitude and an angle for each channel, with learned phases."""
    return Scheme.of(parts.Rope(base, pairs="polar"))


@preset("Heo et al. 2024, arXiv:2403.13298")
def rope_axial(base: float = 100) -> Scheme:
    """RoPE-ViT, fixed: half of the pairs rotate by a patch's column, half by its row."""
    rope = parts.Rope(base, pairs="adjacent", axes=parts.Axial())
    return Scheme.of(rope, parts.Bidirectional())


@preset("Heo et al. 2024, arXiv:2403.13298")
def rope_mixed(base: float = 10) -> Scheme:
    """RoPE-ViT, mixed: each pair of each head rotates along a learned direction."""
    rope = parts.Rope(base, pairs="adjacent", axes=parts.Mixed())
    return Scheme.of(rope, parts.Bidirectional())


@preset("Wang et al. 2024, arXiv:2409.12191")
def qwen2_vl(sections: tuple[int, ...] = (16, 24, 24), base: float = 1_000_000) -> Scheme:
    """M-RoPE in sections: the fastest pairs rotate by time, the others by row or column."""
    return Scheme.of(parts.Rope(base, axes=parts.Mrope(sections)))


@preset("Qwen Team 2025, transformers 5.22 'qwen3_vl'")
def qwen3_vl(sections: tuple[int, ...] = (24, 20, 20), base: float = 5_000_000) -> Scheme:
    """M-RoPE interleaved: time, row and column each have pairs of all frequencies."""
    return Scheme.of(parts.Rope(base, axes=parts.Mrope(sections, interleaved=True)))


@preset("Sun et al. 2022, arXiv:2212.10554")
def xpos_lm() -> Scheme:
    """RoPE with decay."""
    return Scheme.of(parts.Rope(pairs="adjacent", decay=parts.Xpos()))


@preset("Gemma Team 2026, transformers 5.22 'proportional'")
def gemma4_global(base: float = 1_000_000, share: float = 0.25) -> Scheme:
    """The fastest quarter of the pairs is rotated."""
    return Scheme.of(parts.Rope(base, frequencies=parts.Proportional(share)))


@preset("Chen et al. 2023, arXiv:2306.15595")
def position_interpolation(factor: float = 4, base: float = 10000) -> Scheme:
    """All frequencies divided by the factor; in LongChat by 8."""
    return Scheme.of(parts.Rope(base, frequencies=parts.Linear(factor)))


@preset("bloc97 2023; Peng et al. 2023, arXiv:2309.00071")
def ntk_aware(factor: float = 4, base: float = 10000) -> Scheme:
    """A larger base: the fastest pair stays, the slowest is interpolated."""
    return Scheme.of(parts.Rope(base, frequencies=parts.Ntk(factor)))


@preset("Su 2023, kexue.fm/archives/9675")
def su_ntk_old(factor: float = 4, base: float = 10000) -> Scheme:
    """Su's first reading of NTK: the base times the factor."""
    return Scheme.of(parts.Rope(base * factor))


@preset("Su 2023, kexue.fm/archives/9706")
def su_ntk_fixed(factor: float = 4, base: float = 10000) -> Scheme:
    """Su's NTK in a mixed base whose first digit is interpolated too."""
    return Scheme.of(parts.Rope(base, frequencies=parts.NtkMixed(factor, power=1)))


@preset("Su 2023, kexue.fm/archives/9706")
def su_ntk_mixed(factor: float = 4, train: int = 4096, base: float = 10000) -> Scheme:
    """Su's best NTK, with logn clipped for models trained without it."""
    return Scheme.of(parts.Rope(base, frequencies=parts.NtkMixed(factor)), parts.LogN(train))


@preset("emozilla 2023; Peng et al. 2023, arXiv:2309.00071")
def dynamic_ntk_llama(original: int = 4096, factor: float = 1, base: float = 10000) -> Scheme:
    """The base grows with the length of the call."""
    return Scheme.of(parts.Rope(base, frequencies=parts.DynamicNtk(original, factor)))


@preset("Peng et al. 2023, arXiv:2309.00071")
def dynamic_interpolation(original: int = 4096, base: float = 10000) -> Scheme:
    """Interpolation by a factor that follows from the length of the call."""
    return Scheme.of(parts.Rope(base, frequencies=parts.DynamicLinear(original)))


@preset("Peng et al. 2023, arXiv:2309.00071")
def ntk_by_parts(factor: float = 4, original: int = 4096, base: float = 10000) -> Scheme:
    """Slow pairs interpolated, fast ones unchanged; no temperature."""
    return Scheme.of(parts.Rope(base, frequencies=parts.ByParts(factor, original=original)))


@preset("Peng et al. 2023, arXiv:2309.00071")
def yarn_llama(factor: float = 16, original: int = 4096, base: float = 10000) -> Scheme:
    """YaRN as released."""
    return Scheme.of(parts.Rope(base, frequencies=parts.Yarn(factor, original=original)))


@preset("Peng et al. 2023, arXiv:2309.00071")
def dynamic_yarn_llama(original: int = 4096, base: float = 10000) -> Scheme:
    """YaRN with a factor that follows from the length of the call."""
    return Scheme.of(parts.Rope(base, frequencies=parts.DynamicYarn(original)))


@preset("Longitude")
def stepped_yarn(original: int = 4096, step: float = 1, base: float = 10000) -> Scheme:
    """YaRN whose factor grows with the query's own position: decoding equals prefill at any
    length."""
    yarn = parts.Stepped("yarn", original=original, step=step)
    return Scheme.of(parts.Rope(base, frequencies=yarn))


@preset("Wang et al. 2024, arXiv:2403.00071")
def resonance_yarn(factor: float = 16, original: int = 4096, base: float = 10000) -> Scheme:
    """YaRN with wavelengths rounded to whole positions."""
    yarn = parts.Yarn(factor, original=original)
    return Scheme.of(parts.Rope(base, frequencies=parts.Resonance(yarn)))


@preset("Pal et al. 2023, arXiv:2308.10882")
def giraffe_power(power: float = 0.5, base: float = 10000) -> Scheme:
    """Slow pairs rotate more slowly still, by a power of their place among the pairs."""
    return Scheme.of(parts.Rope(base, frequencies=parts.PowerBasis(power)))


@preset("Pal et al. 2023, arXiv:2308.10882")
def giraffe_truncated(train: int = 4096, base: float = 10000) -> Scheme:
    """Slow pairs rotate at a common rate, the slowest not at all."""
    return Scheme.of(parts.Rope(base, frequencies=parts.TruncatedBasis(train)))


@preset("Chen et al. 2025, arXiv:2410.21216")
def hope(train: int = 4096, base: float = 10000) -> Scheme:
    """Pairs that finish no turn in the trained window are not rotated."""
    return Scheme.of(parts.Rope(base, frequencies=parts.FloorToZero(train)))


@preset("Wertheimer et al. 2026, arXiv:2603.18017")
def rope_id(train: int = 4096, head_dim: int = 128) -> Scheme:
    """Half of a head rotated, so fast that every pair finishes a turn in the trained window; the
    paper's lowest frequency and temperature are not public: this is the safe reading of both."""
    dims = head_dim // 2
    if dims <= 2 or train < 7:
        raise UserError(
            f"rope_id: half of a head must be two pairs or more and a turn 7 tokens, but got a "
            f"head of {head_dim} and {train} tokens: 128 and 4096 are usual."
        )
    base = (train / (2 * math.pi)) ** (dims / (dims - 2))
    return Scheme.of(parts.Rope(base, fraction=0.5))


@preset("Dubey et al. 2024, arXiv:2407.21783")
def llama31(factor: float = 8, original: int = 8192, base: float = 500_000) -> Scheme:
    """Llama 3.1's scaling."""
    return Scheme.of(parts.Rope(base, frequencies=parts.Llama3(factor, original=original)))


@preset("Ding et al. 2024, arXiv:2402.13753")
def longrope_phi3(
    short: tuple[float, ...], long: tuple[float, ...], original: int = 4096, factor: float = 32
) -> Scheme:
    """Searched factors, one for each pair."""
    frequencies = parts.LongRope(short, long, original=original, factor=factor)
    return Scheme.of(parts.Rope(frequencies=frequencies))


__all__ = [*PRESETS, "PAPERS", "PRESETS"]  # pyright: ignore[reportUnsupportedDunderAll]
