"""What a serving engine holds on each device, and how many requests at once: the arithmetic is the engine's own
(serve/pool_size.py, layers/page_layout.py), on sizes that are known without devices."""

import bisect
import dataclasses
import math
from collections import Counter

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block_indexer import BlockIndexerConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.page_layout import PageLayout
from shardlm.ops import attention, grouped_weights
from shardlm.ops.chunk_attention import block_positions
from shardlm.plan.serving import linear_attention as linear
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.drafts import drafter_of
from shardlm.plan.serving.images import bytes_of, is_read
from shardlm.plan.serving.mix import Mix
from shardlm.plan.serving.paged_parts import attending_heads
from shardlm.plan.serving.split_pages import Split
from shardlm.plan.serving.weights import (
    Held,
    cache_bytes,
    held_bytes,
    made_anew,
    one_layer,
    rules_for,
    stages_of,
    weights_of,
)
from shardlm.plan.sketch import Described
from shardlm.plan.sketch import refuse as unknown
from shardlm.rules import Rules
from shardlm.serve.few_bits import few_bits_of
from shardlm.serve.layers import apart
from shardlm.serve.memories import refuse, request_bytes
from shardlm.serve.pool_size import ALLOCATED, CHUNK_TOKENS, page_bytes, room_beside, sized
from shardlm.serve.prefill import Prefill, chosen
from shardlm.serve.programs import SCORED_AT_ONCE
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.speculation.build import layouts_for
from shardlm.serve.stages import layout_of as part_of_layout
from shardlm.serve.state import MAX_BANNED, MAX_BIASES
from shardlm.serve.submeshes import of_replica, of_stage
from shardlm.state import ModelDef, kv_ways

ACTIVATION = 4  # bytes of a logit
# Arrays of [rows, vocabulary] in float32 that a decode program keeps at once: 5.6 (compiled for an H100: Llama 3's
# vocabulary, 256 rows), and 4 without the rows' counts (ops/batch_sampling.py).
SAMPLER_ARRAYS = 5.6
# The same of prompts whose tokens are scored, on one device and where the parts of several are gathered first: 2.0 and
# 3.1 (compiled: 64 rows of 32 tokens, tensor 1 and 4).
SCORED_ARRAYS = (2.0, 3.1)
# Arrays of queries that a program of prompts holds besides where it attends by cuDNN and not over pages: 3.4 and 2.8
# (compiled: 2,048 tokens of Llama 3 8B and 70B, tensor 1 and 4).
WHOLE_ARRAYS = 3
# And where it attends in parts, beside a block of keys and values and in place of what the MLP makes: 2.8, 1.8, 2.4
# (compiled: 512, 2,048 and 8,192 tokens of Llama 3 8B with a narrow MLP).
PARTS_ARRAYS = 2.6


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes of one device of a pipeline stage.

    weights, pages, slots  exactly what the engine allocates, with what is kept for drafts
    memories      the same of what layers of linear attention remember texts by
    draft         of the weights, those of layers that draft
    encoder       of the weights, those that images are read by
    decode        temporaries of its largest decode program, estimated
    prefill       the same of the program of prompts that needs most
    prefill_key   and which that is, as the runner names it: kind, (rows, tokens of a row)
    page          of one page
    """

    layers: slice
    weights: int
    pages: int
    slots: int
    decode: float
    prefill: float
    prefill_key: tuple[str, tuple[int, int]]
    page: int
    memories: int = 0
    draft: int = 0
    encoder: int = 0

    @property
    def held(self) -> int:
        """Between programs."""
        return self.weights + self.pages + self.memories + self.slots

    @property
    def temporaries(self) -> float:
        return max(self.decode, self.prefill)

    @property
    def total(self) -> float:
        return self.held + self.temporaries


@dataclasses.dataclass(frozen=True)
class ServingMemory:
    """sizes   of a replica's programs and its pool, as the engine makes them
    limit   bytes that jax may take of a GPU
    beside  the page layout of layers that draft
    decoded the most tokens of a row in one decode program
    """

    stages: tuple[StageMemory, ...]
    sizes: RunnerConfig
    limit: float
    beside: PageLayout | None
    decoded: int

    @property
    def layout(self) -> PageLayout:
        return self.sizes.layout

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def tokens_held(self) -> int:
        """Of one sequence after another, in the pages of a replica, where every layer sees all; with windows, fewer
        pages a token are needed once a sequence is longer than they are. Where pages of entries stand for more tokens
        than others, of sequences of max_model_len."""
        layout, sizes, count = self.layout, self.sizes, self.layout.num_pages - 1
        if layout.strides:
            return count * sizes.max_model_len // layout.pages_of(sizes.max_model_len, sizes.page_size, self.decoded)
        return count * sizes.page_size // len(layout.windows)

    def at_once(self, prompt_len: int, output_len: int) -> int:
        """Requests of these lengths of which a replica preempts none, wherever in their replies they are: slots and
        pages for all of them when they are longest. The last token is sampled and not written."""
        most = self.layout.pages_of(prompt_len + output_len - 1, self.sizes.page_size, self.decoded)
        return min(self.sizes.max_rows, (self.layout.num_pages - 1) // most)

    def at_once_of(self, mix: Mix) -> int:
        """The same of a mix: on average of its requests, each at its longest. A page that several of those under way
        share is held once, in layers that see all."""
        if len(mix.kinds) == 1 and not mix.shares:
            return self.at_once(mix.kinds[0].prompt, mix.kinds[0].output)
        replies = sum(kind.output for kind in mix.kinds)
        own, groups = 0.0, self.layout.windows.count(0)
        having: Counter[bytes] = Counter()  # share of those under way that have a page
        for kind in mix.kinds:
            share, common = kind.output / replies, mix.cached(kind) // mix.page
            pages = self.layout.pages_of(kind.prompt + kind.output - 1, self.sizes.page_size, self.decoded)
            own += share * (pages - groups * common)
            for page in kind.shared[:common]:
                having[page] += share
        without = np.maximum(0.0, 1 - np.array(list(having.values())))

        def pages_of(count: int) -> float:
            return own * count + groups * float(np.sum(1 - without**count))

        every = range(1, self.sizes.max_rows + 1)
        return bisect.bisect_right(every, self.layout.num_pages - 1, key=pages_of)


def serving_memory(case: ServingCase) -> ServingMemory:
    """Of an engine on every GPU of its mesh. Raises ShardlmError for what does not divide and for what does not fit,
    as the engine does."""
    engine, shape = case.engine, case.model.shape
    unknown(shape, case.length)
    refuse(shape)
    shape.check_stages(engine.mesh.pipeline)
    rules, split = rules_for(engine, shape, case.weights), engine.decode_context_parallel_size
    mesh = of_replica(engine.mesh)
    model = one_layer(shape, of_stage(mesh), case.dtype, engine.kv_cache_dtype, split)
    weights = weights_of(shape, mesh, case.dtype, case.weights, engine.room)
    runs = stages_of(shape.num_layers, mesh)
    drafter = drafter_of(case)
    lengths = case.length, engine.block_size, engine.decoded
    layout, *beside = layouts_for(shape, drafter and drafter.windows, *lengths, engine.drafts, kv_ways(model))
    own = [weights.stage(run, i == 0, i == len(runs) - 1) for i, run in enumerate(runs)]
    held = [held_bytes(stage, rules) for stage in own]
    each = _page_bytes(case, model, layout, runs)
    if drafter:
        held[-1] += drafter.weight_bytes
        each[-1] += page_bytes(drafter.model, beside[0], engine.block_size)
    batch_tokens = engine.max_num_batched_tokens or CHUNK_TOKENS[False]
    seen = bytes_of(case.model.seen, engine, case.length, batch_tokens, DTYPE_BYTES[case.dtype])
    held[0] += sum(seen)
    limit, devices = ALLOCATED * case.cluster.gpu.hbm_bytes, of_stage(mesh).size("expert", "tensor")
    rooms = [room_beside(nbytes, limit, engine) * devices for nbytes in held]
    if not all(rooms):
        raise ShardlmError(
            f"{max(held) / 2**30:.1f} GiB of weights a GPU leave no room for pages: gpu_memory_utilization="
            f"{engine.gpu_memory_utilization} less 0.05 of {limit / 2**30:.1f} GiB on {mesh}"
        )
    memories = [request_bytes(model, part_of_layout(layout, run)) for run in runs]
    memories[-1] += request_bytes(drafter.model, beside[0]) if drafter else 0
    sizes, *beside = sized([layout, *beside], each, rooms, case.length, engine, engine.mesh.data, memories)
    few_bits = few_bits_of(shape, case.weights, grouped_weights.choose(sizes.platform))
    prefill = _prefill(case, model)
    # As image_encoder.fitted has it: tokens of an image that see those after them are not read in parts.
    in_parts = prefill.in_parts and not (is_read(case.model.seen, engine) and case.model.seen.sight.whole)
    sizes = dataclasses.replace(sizes, prefill=prefill.whole, in_parts=in_parts, few_bits=few_bits)
    check_longest(sizes, engine.decoded)
    stages = [
        _stage(case, sizes, rules, run, stage, page // devices, one // devices, i == len(runs) - 1)
        for i, (run, page, one, stage) in enumerate(zip(runs, each, memories, own, strict=True))
    ]
    kept = _kept_for_drafts(case, sizes)
    draft, last = drafter.weight_bytes if drafter else 0, stages[-1]
    stages[-1] = dataclasses.replace(last, weights=last.weights + draft, draft=draft, slots=last.slots + kept)
    first = stages[0]
    of_images = {"weights": first.weights + seen[0], "encoder": seen[0], "slots": first.slots + seen[1]}
    stages[0] = dataclasses.replace(first, **of_images)
    found = ServingMemory(tuple(stages), sizes, limit, beside[0] if beside else None, engine.decoded)
    if found.fullest.total > limit:
        most = found.fullest
        pages = "kv_cache_gib, " if engine.kv_cache_bytes else ""
        raise ShardlmError(
            f"{most.total / 2**30:.1f} GiB a GPU, {most.temporaries / 2**30:.1f} of them temporaries (estimated), and "
            f"jax may take {limit / 2**30:.1f}: lower {pages}gpu_memory_utilization, max_num_seqs or "
            "max_num_batched_tokens"
        )
    return found


def _page_bytes(case: ServingCase, model: ModelDef, layout: PageLayout, runs: list[slice]) -> list[int]:
    """Of one page in the layers of each stage, over all its devices. A stage's layers may have heads of fewer sizes
    than those of the model."""
    shape, engine, models = case.model.shape, case.engine, [model] * len(runs)
    if len(runs) > 1 and len(shape.kept_heads) > 1:
        whole = apart(shape)
        shapes = (dataclasses.replace(whole, segments=whole.segments[run]) for run in runs)
        models = [one_layer(own, of_stage(engine.mesh), case.dtype, engine.kv_cache_dtype) for own in shapes]
    parts = (part_of_layout(layout, run) for run in runs)
    return [page_bytes(own, part, engine.block_size) for own, part in zip(models, parts, strict=True)]


def _prefill(case: ServingCase, model: ModelDef) -> Prefill:
    """How prompts attend, on the cluster's GPUs."""
    layers = list(case.model.shape.attentions())
    heads, capped = {(one.head_dim, one.value_dim) for one in layers}, any(one.softcap for one in layers)
    device = Described.of(case.cluster.gpu)
    how = attention.choose("auto", device, model.execution.dtype, heads, capped, trained=False)
    model = dataclasses.replace(model, execution=dataclasses.replace(model.execution, attention=how))
    return chosen(case.engine.prefill_attention, model, case.engine.deterministic)[0]


def check_longest(sizes: RunnerConfig, decoded: int) -> None:
    """Raises ShardlmError where the pool does not hold a request of max_model_len, as the scheduler does."""
    layout, steps = sizes.layout, max(sizes.max_batch_tokens, decoded)
    needed = layout.pages_of(sizes.max_model_len, sizes.page_size, steps)
    if needed > layout.num_pages - 1:
        raise ShardlmError(
            f"a request of max_model_len={sizes.max_model_len} tokens needs {needed} pages of {sizes.page_size}, and "
            f"the pool has {layout.num_pages - 1}"
        )


def slot_bytes(rows: int, vocab: int) -> int:
    """What the engine keeps of each request besides pages, and of padding (serve/state.py's Slots), whole on each
    device."""
    words = -(-vocab // 32)
    settings = 4 * 9 + 8  # ops/batch_sampling.py's RowSettings
    return (rows + 1) * (2 * 4 + 1 + settings + 4 * (2 * MAX_BIASES + MAX_BANNED) + 8 * words + 2 * vocab)


def _kept_for_drafts(case: ServingCase, sizes: RunnerConfig) -> int:
    """Of each slot and the one for padding: its text, or what modules or a head take with the next token
    (speculation/)."""
    asked, rows = case.engine.speculative_config, sizes.max_rows + 1
    if asked is None or asked.method == "draft_model":
        return 0
    if asked.method == "ngram":
        return 4 * rows * sizes.max_model_len
    numbers = case.draft.shape.embed_dim if case.draft else case.model.mtp.depth * case.model.shape.embed_dim
    return rows * (numbers * DTYPE_BYTES[case.dtype] + 4)


def _stage(
    case: ServingCase,
    sizes: RunnerConfig,
    rules: Rules,
    run: slice,
    weights: list[Held],
    page: int,
    memory: int,
    last: bool,
) -> StageMemory:
    """Temporaries are what the fullest moments of a program hold: a layer's activations and what it dequantises, logits
    of prompts that are scored, the sampler."""
    shape, itemsize, V = case.model.shape, DTYPE_BYTES[case.dtype], case.model.shape.vocab_size
    widest = max(_layer_numbers(block, rules, shape.embed_dim) for block in shape.blocks())
    heads = max(block.attention.num_heads * block.attention.head_dim for block in shape.blocks())
    heads //= rules.mesh.size(*rules.use.axes("heads"))
    position = itemsize * max((_kept_numbers(one, rules) for one in shape.attentions()), default=0)
    splits, whole = _splits(case, rules), attending_heads(shape, rules, itemsize)
    between = 3 * shape.embed_dim * (1 + (shape.streams.count if shape.streams else 0))

    mixtures = [block.mlp for block in shape.blocks() if isinstance(block.mlp, MoeConfig)]
    of_expert = max((mlp.top_k / mlp.choices for mlp in mixtures), default=0.0)  # of the tokens, on average

    def unpacked(tokens: int) -> int:
        shares = ((held, of_expert if held.of_experts else 1) for held in weights)
        made = (held.elements(rules.use) * held.packed for held, share in shares if made_anew(held, tokens * share))
        return 2 * itemsize * max(made, default=0)

    def needs(kind: str, size: tuple[int, int]) -> float:
        rows, tokens = size
        how, each = sizes.chunk_programs[kind, size], rows * tokens * itemsize
        more = WHOLE_ARRAYS * heads if "whole" in how else 0
        layer = each * (between + widest + more)
        if not how and not splits:
            layer = max(layer, each * between + max((one.of_tokens(rows * tokens) for one in whole), default=0))
        if splits and "whole" not in how:
            layer = max(layer, each * between + max(one.held(rows, tokens, sizes.max_model_len) for one in splits))
        if "parts" in how:
            block = rows * position * min(sizes.max_model_len, block_positions(rows, position))
            layer = max(layer, each * (between + PARTS_ARRAYS * heads) + block)
        layer += unpacked(rows * tokens)
        scored = (
            SCORED_ARRAYS[bool(rules.use.axes("vocab"))] * ACTIVATION * rows * math.gcd(tokens, SCORED_AT_ONCE) * V
            if last
            else 0
        )
        return max(layer + rows * gathered, scored) + joined

    own = list(shape.blocks())[run]
    indexers = (getattr(block.attention, "indexer", None) for block in own)
    keys = max((one.head_dim for one in indexers if isinstance(one, BlockIndexerConfig)), default=0)
    gathered = itemsize * keys * sizes.max_model_len  # of a row, whose blocks' keys are averaged anew
    joined = linear.joined_bytes(own, rules, shape.embed_dim, itemsize) if case.weights == "dtype" else 0
    rows, each = sizes.max_rows, 1 + case.engine.drafts
    attending = [one.held(rows, each, sizes.max_model_len) for one in splits or whole]
    layer = rows * (each * itemsize * between + gathered) + max(rows * each * itemsize * widest, *attending, 0)
    sampler = (SAMPLER_ARRAYS + (each if each > 1 else 0)) * ACTIVATION * rows * V
    decode = (max(layer, sampler) if last else layer) + unpacked(rows * each)
    largest = max(sizes.chunk_programs, key=lambda key: needs(*key))
    return StageMemory(
        run,
        held_bytes(weights, rules),
        page * sizes.layout.num_pages,
        slot_bytes(rows, V) if last else 0,
        decode,
        needs(*largest),
        largest,
        page,
        sizes.layout.slots * memory,
    )


def _splits(case: ServingCase, rules: Rules) -> list[Split]:
    """Of each kind of attention whose pages' positions are split; no model of which has heads of several sizes."""
    ways, stage = case.engine.decode_context_parallel_size, of_stage(case.engine.mesh)
    if ways == 1:
        return []
    model = one_layer(case.model.shape, stage, case.dtype, case.engine.kv_cache_dtype, ways)
    where = rules, cache_bytes(model), DTYPE_BYTES[case.dtype]
    return [found for one in case.model.shape.attention_kinds if (found := Split.of(one, *where))]


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _kept_numbers(attention: AttentionConfig | MlaConfig, rules: Rules) -> int:
    """Of a position's keys and values on one device, where these are heads and no latents."""
    kept = getattr(attention, "num_kv_heads", 0)
    return max(1, kept // rules.mesh.size(*rules.use.axes("heads"))) * (attention.head_dim + attention.value_dim)


def _layer_numbers(block, rules: Rules, D: int) -> float:
    """Of one token's activations inside the MLP, on one device; of experts, of the buffer that holds the worst case
    (ops/expert_dispatch.py, where every device has all tokens)."""
    mlp, mesh = block.mlp, rules.mesh
    if isinstance(mlp, MlpConfig):
        return (2 if mlp.gated else 1) * mlp.mlp_dim / mesh.size(*rules.use.axes("mlp"))
    if not isinstance(mlp, MoeConfig):
        return 0.0
    pairs = min(mlp.top_k, mlp.num_experts // mesh.expert)
    return pairs * ((len(mlp.projections) - 1) * mlp.expert_dim / mesh.tensor + 2 * mlp.read_dim(D))
