"""What one device of a pipeline stage computes and sends for one pass of some tokens through its layers, as programs of
the engine do it (serve/programs.py, compiled): operations and collectives for kernels.py and links.py to time."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from shardlm.layers.altup import AltUpConfig
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.block_indexer import BlockIndexerConfig
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.gated_streams import GatedStreamsConfig
from shardlm.layers.head_indexer import HeadIndexerConfig
from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.ngrams import NgramsConfig
from shardlm.layers.param import SCALE, ZERO
from shardlm.plan.op import Layer, Op
from shardlm.plan.serving import altup, gated_streams, split_pages, streams
from shardlm.plan.serving import compressed_attention as compressed
from shardlm.plan.serving import linear_attention as linear
from shardlm.plan.serving import sparse_attention as sparse
from shardlm.plan.serving.prompts import OVER_PAGES, How, attends, gathered
from shardlm.plan.serving.split_pages import Split
from shardlm.plan.serving.weights import MEMORY, InUse, made_anew
from shardlm.rules import Rules
from shardlm.serve.few_bits import BLOCK

# Kernels that are neither matmuls nor attention, compiled for an H100: of a layer 6 besides 7 matmuls and attention's 2
# (norms, rotation, writes of keys and values, activation), of sampling 32.
SMALL_KERNELS, SAMPLING_KERNELS = 6, 32
NAMES = {2: "bf16", 4: "fp32"}  # of numbers of so many bytes, as hardware.Peak has them
# Projections that multiply what another one does, which is made into 8 bits once.
BESIDE = {"wk": "wq", "wv": "wq", "up": "gate", "wkv_down": "wq_down"}
SAMPLER_PASSES = 10  # over float32 [rows, vocabulary]: log-probabilities, the greedy token, top log-probabilities


@dataclasses.dataclass(frozen=True)
class Pass:
    """Rows of tokens that go through the model at once.

    tokens    in all rows
    rows      of which the last token is sampled
    context   positions before each row's tokens
    itemsize  bytes of an activation
    drafts    tokens of each row that are drafts to verify: all its tokens get logits
    sampled   how often the rows are sampled from, one token of each after another
    prompts   how they attend where they are chunks of prompts (prompts.py); "": as fast as any kernel does
    """

    tokens: float
    rows: float
    context: float
    itemsize: int
    drafts: int = 0
    sampled: float = 1
    prompts: How = ""

    @property
    def each(self) -> float:
        """Tokens of a row."""
        return self.tokens / self.rows


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """kind as in links.py; nbytes sent by one device in all `count` of them together."""

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    count: float


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one pass through a stage. `least_bytes` is what any engine has to read: weights in use as they are held and
    the keys and values that are seen."""

    ops: tuple[Op, ...]
    exchanged: tuple[Exchanged, ...]
    least_bytes: float


def layer_work(
    block: BlockConfig, weights: Sequence[InUse], rules: Rules, cache_bytes: float, one: Pass, D: int
) -> Work:
    """Of one layer. cache_bytes: of one position in the layer, on this device."""
    plain = [held for held in weights if held.summed and not held.of_experts]
    scales, kv = _beside(weights), 0.0
    kind = "linear attention" if isinstance(block.attention, DeltaNetConfig) else "attention"
    ops = [op for held in plain for op in _projection(held, _layer_of(held, kind), scales, one.tokens, one.itemsize)]
    least = sum(held.nbytes for held in weights if not held.of_experts)
    for mixer in block.mixers:
        mixing, read = _mixing(mixer, weights, rules, split_pages.whole_bytes(rules, one.each, cache_bytes), one)
        ops, kv = ops + mixing, kv + read
    if block.streams:
        ops += _around(block.streams, D, one)
    if block.ngrams:
        ops += gated_streams.looked_up(block.ngrams, D, one.tokens, one.itemsize)
    small = one.tokens * D * 3 * one.itemsize
    ops.append(Op("norm", "norms, rotation, activation, writes", "memory", 0, small, SMALL_KERNELS))
    ops += [op for held in plain for op in _in_eight_bits(held, _layer_of(held, kind), plain, one)]
    exchanged = [*_reduced(block, rules, one, D)]
    split = Split.of(block.attention, rules, cache_bytes, one.itemsize)
    if split and attends(one.prompts, block.attention) != "whole":
        own = split.sent(one.tokens, one.rows, attended(block.attention.window, one)[0])
        exchanged += [Exchanged(kind, split_pages.axes_of(rules), nbytes, 1) for kind, nbytes in own]
    exchanged += [
        Exchanged("all-reduce", held.over, _all_reduced(4 * one.tokens, held.over, rules), 1)
        for held in plain
        if held.product and held.over
    ]
    if isinstance(block.mlp, MoeConfig):
        touched = touched_share(block.mlp, one.tokens)
        experts = [held for held in weights if held.of_experts]
        ops += _experts(block.mlp, experts, rules, one, touched)
        least += touched * sum(held.nbytes for held in experts)
    return Work(tuple(ops), tuple(exchanged), least + kv)


def products(weights: Sequence[InUse], one: Pass) -> Work:
    """Of projections alone."""
    ops = [op for held in weights for op in _projection(held, "mlp", {}, one.tokens, one.itemsize)]
    return Work(tuple(ops), (), sum(held.nbytes for held in weights))


def _around(own: StreamsConfig | GatedStreamsConfig | AltUpConfig, D: int, one: Pass) -> Iterator[Op]:
    """What several streams add to a layer."""
    if isinstance(own, AltUpConfig):
        yield from altup.around(own, D, one.tokens, one.itemsize)
        return
    around = gated_streams.around if isinstance(own, GatedStreamsConfig) else streams.around
    for _ in range(2):  # attention, and MLP or experts
        yield from around(own, D, one.tokens, one.itemsize)


def _mixing(attention, weights: Sequence[InUse], rules: Rules, cache_bytes: float, one: Pass) -> tuple[list[Op], float]:
    """What attention, or what is in its place or beside it, does besides its projections, and the bytes that it reads
    of what is remembered of the rows' texts."""
    ops: list[Op] = []
    if isinstance(attention, DeltaNetConfig):
        own = linear.state_bytes(attention, rules, one.itemsize, one.drafts)
        kv = 2 * one.rows * own  # read, and written
        ops += linear.operations(attention, rules, one.rows, one.each, one.itemsize, one.drafts)
    elif isinstance(attention, CompressedConfig):
        of_window = functools.partial(attended, one=one)
        seen = compressed.Seen.of(attention, one.tokens, one.rows, of_window)
        rows = compressed.Rows.of(attention, cache_bytes)
        kv = rows.least(seen)
        ops += compressed.operations(attention, weights, rules, rows, seen, one)
    elif isinstance(own := getattr(attention, "indexer", None), BlockIndexerConfig | HeadIndexerConfig):
        (seen, pairs), (_, few) = attended(0, one), attended(own.top_k, one)
        key = own.head_dim * one.itemsize
        choosing = sparse.choosing_blocks if isinstance(own, BlockIndexerConfig) else sparse.choosing_by_heads
        ops += choosing(own, key, one.tokens, pairs, one.rows * seen, one.itemsize)
        kv = one.rows * (min(seen, own.top_k * one.each) * (cache_bytes - key) + seen * key)
        ops.append(_attention(attention, rules, one, few, few * (cache_bytes - key)))
    elif getattr(attention, "indexer", None):
        share, count = sparse.Share.of(attention, cache_bytes), attention.indexer.top_k
        (seen, pairs), (_, few) = attended(0, one), attended(count, one)
        ops += sparse.operations(attention, share, one.tokens, pairs, one.rows * seen, one.itemsize)
        ops.append(_attention(attention, rules, one, few, few * share.latent))  # each query reads its own
        kv = one.rows * (min(seen, count * one.each) * share.latent + seen * share.key)
    else:
        seen, pairs = attended(attention.window, one)
        kv = one.rows * seen * cache_bytes
        how = attends(one.prompts, attention)
        ops.append(_attention(attention, rules, one, pairs, kv, OVER_PAGES if how == "pages" else "pages"))
        if how == "parts":
            out = attention.value_dim * attention.num_heads / rules.mesh.size(*rules.use.axes("heads"))
            ops += gathered(one.tokens, one.rows, one.context, cache_bytes, out)
    return ops, kv


def touched_share(moe: MoeConfig, tokens: float) -> float:
    """Of the experts, those that tokens with even and independent choices are expected to reach."""
    return 1 - (1 - moe.top_k / moe.choices) ** tokens


def attended(window: int, one: Pass) -> tuple[float, float]:
    """(positions whose keys and values a row reads, (query, key) pairs of all rows), where a query sees so many
    positions; 0: all."""
    c, s = one.each, one.context
    if not window:
        return s + c, one.rows * (c * s + c * (c + 1) / 2)
    ramp = max(0.0, min(c, window - s))  # tokens that do not fill the window yet
    pairs = ramp * s + ramp * (ramp + 1) / 2 + (c - ramp) * window
    return min(s + c, window + c - 1), one.rows * pairs


def _layer_of(held: InUse, attention: Layer) -> Layer:
    if held.name.startswith(MEMORY):
        return "linear attention"
    return attention if held.name.startswith("w") or held.name in ("decay", "beta") else "mlp"


def _projection(held: InUse, layer: Layer, scales: Mapping[str, int], tokens: float, itemsize: int) -> Iterator[Op]:
    """The matmul and, where a weight in few bits is not multiplied as it is held, its numbers made and written first
    (compiled: XLA makes them anew for each use). The kernel reads a weight once for so many rows; its parts, 13 MB at
    most (64 rows of 384 blocks of 128 columns), stay in a GPU's cache."""
    k = held.summed
    weight, n = held.nbytes, held.numbers / k
    if made_anew(held, tokens):
        weight = held.numbers * itemsize
        yield Op(layer, f"{held.name}: dequantised", "memory", 0, held.nbytes + weight, 1)
    elif held.packed:
        weight = (weight + scales[held.name]) * math.ceil(tokens / BLOCK)
    moved = weight + itemsize * tokens * (n + k)
    flops, dims = 2.0 * tokens * held.numbers, (tokens, n, k)
    yield Op(layer, held.name, "matmul", flops, moved, 1, dims=dims, dtype=held.product or NAMES[itemsize])


def _beside(weights: Sequence[InUse]) -> dict[str, int]:
    """Bytes of scales and zeros, by the name of their weight."""
    found: Counter[str] = Counter()
    for held in weights:
        for end in (SCALE, ZERO):
            if held.name.endswith(end):
                found[held.name.removesuffix(end)] += held.nbytes
    return found


def _in_eight_bits(held: InUse, layer: Layer, others: Sequence[InUse], one: Pass) -> Iterator[Op]:
    """What a projection multiplies is read for each token's largest number, and again for the 8-bit ones (compiled: a
    kernel each). Scales multiply in the kernels that take the results anyway."""
    if not held.product or BESIDE.get(held.name.removeprefix(MEMORY)) in {other.name for other in others}:
        return
    yield Op(layer, f"{held.name}: 8 bits", "memory", 0, one.tokens * held.summed * (2 * one.itemsize + 1) / 2, 2)


def _attention(
    attention: AttentionConfig | MlaConfig, rules: Rules, one: Pass, pairs: float, kv: float, what: str = "pages"
) -> Op:
    N = attention.num_heads / rules.mesh.size(*rules.use.axes("heads"))
    if isinstance(attention, MlaConfig):  # in the space of the latents
        width = 2 * attention.kv_latent_dim + attention.rope_dim
    else:
        width = attention.head_dim + attention.value_dim
    moved = kv + one.tokens * N * width * one.itemsize
    dims = (one.each, pairs / one.tokens, width / 2)
    return Op("attention", what, "attention", pairs * N * width, moved / 2, 2, dims=dims)


def _experts(moe: MoeConfig, experts: Sequence[InUse], rules: Rules, one: Pass, touched: float) -> Iterator[Op]:
    """Every device of the expert axis has all tokens and runs those of its own experts."""
    pairs = one.tokens * moe.working / rules.mesh.expert
    scales = _beside(experts)
    for held in experts:
        if not held.summed:
            continue
        each = held.numbers / (moe.num_experts / rules.mesh.expert)  # of one expert
        weight = touched * (held.nbytes + scales.get(held.name, 0))
        if made_anew(held, one.tokens * moe.top_k / moe.choices):  # of all experts, whichever are reached
            weight = touched * held.numbers * one.itemsize
            moved = held.nbytes + held.numbers * one.itemsize
            yield Op("moe", f"{held.name}: dequantised", "memory", 0, moved, 1)
        k = held.summed
        moved = weight + one.itemsize * pairs * (k + each / k)
        dims = (
            pairs / (touched * moe.num_experts / rules.mesh.expert),
            each / k,
            k,
        )
        yield Op("moe", held.name, "matmul", 2.0 * pairs * each, moved, 1, dims=dims, dtype=NAMES[one.itemsize])


def _reduced(block: BlockConfig, rules: Rules, one: Pass, D: int) -> Iterator[Exchanged]:
    """The sums after attention and after MLP or experts, over the devices that have parts of them. Experts and shared
    experts are summed together where they are split alike (compiled)."""
    experts = isinstance(block.mlp, MoeConfig)
    after = {rules.use.axes("experts") + rules.use.axes("expert_mlp")} if experts else set()
    if block.mlp.there and (not experts or block.mlp.shared_dim):
        after.add(rules.use.axes("mlp"))
    heads = [rules.use.axes("heads")] * len(block.mixers)
    for axes, sums in Counter(filter(None, [*heads, *after])).items():
        yield Exchanged("all-reduce", axes, sums * _all_reduced(one.tokens * D * one.itemsize, axes, rules), sums)


def _all_reduced(nbytes: float, axes: tuple[str, ...], rules: Rules) -> float:
    """Bytes that one device sends for the sum of arrays of `nbytes` over the devices of some axes."""
    devices = rules.mesh.size(*axes)
    return 2 * (devices - 1) / devices * nbytes


def inputs_work(weights: Sequence[InUse], rules: Rules, one: Pass) -> Work:
    """What each layer takes of each token, made at once for all of them (layers/layer_inputs.py): rows of a table that
    is split by tokens, and a projection of the embedding."""
    (made,) = (held for held in weights if held.summed)
    each = made.numbers / made.summed  # of a token, of all layers
    nbytes, axes = one.tokens * each * one.itemsize, rules.use.axes("vocab")
    ops = [
        *_projection(made, "embedding", _beside(weights), one.tokens, one.itemsize),
        Op("embedding", "layers' inputs: lookup and norm", "memory", 0, 3 * nbytes, 2),
    ]
    exchanged = [Exchanged("all-reduce", axes, _all_reduced(nbytes, axes, rules), 1)] if axes else []
    return Work(tuple(ops), tuple(exchanged), made.nbytes)


def ngrams_work(ngrams: Sequence[NgramsConfig], rules: Rules, one: Pass) -> Work:
    """Rows of tables that are found where they rest: rows split over the vocabulary's devices are summed, columns
    gathered."""
    nbytes = one.tokens * one.itemsize * sum(own.dim for own in ngrams)
    over_rows, over_columns = rules.rest.axes("vocab"), rules.rest.axes("embed")
    exchanged = []
    if rules.mesh.size(*over_rows) > 1:
        exchanged.append(Exchanged("all-reduce", over_rows, _all_reduced(nbytes, over_rows, rules), len(ngrams)))
    if (ways := rules.mesh.size(*over_columns)) > 1:
        exchanged.append(Exchanged("all-gather", over_columns, (ways - 1) / ways * nbytes, len(ngrams)))
    lookup = Op("embedding", "n-grams: lookup", "memory", 0, 2 * nbytes / len(ngrams), 2 * len(ngrams))
    return Work((lookup,), tuple(exchanged), nbytes)


def ends_work(head: InUse, rules: Rules, one: Pass, vocab: int, D: int) -> Work:
    """Embedding, head and sampling, of the stages that have them."""
    axes, B = rules.use.axes("vocab"), one.rows * (1 + one.drafts)
    t = rules.mesh.size(*axes)
    logits = 4 * B * vocab
    of_head = {"dims": (B, vocab / t, D), "dtype": NAMES[one.itemsize]}
    sampling = SAMPLER_PASSES * 4 * one.rows * vocab / SAMPLING_KERNELS
    ops = [
        Op("embedding", "lookup", "memory", 0, 2 * one.tokens * D * one.itemsize, 1),
        Op("head", "logits", "matmul", 2.0 * B * head.numbers, head.nbytes + logits / t, 1, **of_head),
        Op("head", "sampling", "memory", 0, sampling, SAMPLING_KERNELS * one.sampled),
    ]
    exchanged = []
    if axes:
        exchanged.append(Exchanged("all-reduce", axes, _all_reduced(one.tokens * D * one.itemsize, axes, rules), 1))
        exchanged.append(Exchanged("all-gather", axes, (t - 1) / t * logits, 1))
    return Work(tuple(ops), tuple(exchanged), head.nbytes)
