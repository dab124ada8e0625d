"""How long a decode step and the chunks of a prompt take: every operation against the roofline, collectives over their
links, and both against the time that reading the bytes alone would take. Estimates, from formulas."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from shardlm.hardware import Gpu
from shardlm.layers.altup import AltUpConfig
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.gated_streams import GatedStreamsConfig
from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.mla import MlaConfig
from shardlm.mesh import MeshSpec
from shardlm.ops import attention
from shardlm.plan.cluster import Cluster
from shardlm.plan.constants import BOTH, FEW_ROWS, GAP, SMALL_SUMS
from shardlm.plan.kernels import EIGHT_BITS, Kernels
from shardlm.plan.links import Route
from shardlm.plan.op import Op
from shardlm.plan.serving import altup, encoder, gated_streams, streams
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.drafts import Drafter, drafter_of
from shardlm.plan.serving.fused import fused, planned
from shardlm.plan.serving.memory import DTYPE_BYTES, ServingMemory
from shardlm.plan.serving.ops import Exchanged, Pass, Work, ends_work, inputs_work, layer_work, ngrams_work
from shardlm.plan.serving.prompts import OVER_PAGES, how_of
from shardlm.plan.serving.weights import Held, InUse, Weights, cache_bytes, one_layer, rules_for, weights_of
from shardlm.plan.sketch import Described
from shardlm.rules import Rules
from shardlm.serve.submeshes import of_replica, of_stage


@dataclasses.dataclass(frozen=True)
class Timed:
    """Seconds of one device.

    parts   by layer (op.Layer), and of collectives by their axes
    least   of reading what has to be read at the memory's full rate
    """

    parts: dict[str, float]
    least: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """A token for each of `batch` requests of a replica; where tokens are drafted, as many as a step brings on average,
    and all seconds are a token's share of it.

    seconds       between two tokens of a request
    least         by the bandwidth bound: bytes read by the device with most, at the memory's full rate
    parts         seconds by what takes them, of the slowest stage times the number of stages
    """

    batch: int
    seconds: float
    least: float
    parts: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Of the replica."""
        return self.batch / self.seconds

    @property
    def of_bound(self) -> float:
        """1: as fast as the memory can be read."""
        return self.least / self.seconds


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, for what it remembers
class Speed:
    """A replica's times."""

    case: ServingCase
    memory: ServingMemory
    weights: Weights
    rules: Rules

    @classmethod
    def of(cls, case: ServingCase, memory: ServingMemory) -> "Speed":
        mesh = of_replica(case.engine.mesh)
        weights = weights_of(case.model.shape, mesh, case.dtype, case.weights, case.engine.room)
        return cls(case, memory, weights, rules_for(case.engine, case.model.shape, case.weights))

    @property
    def stages(self) -> int:
        return len(self.memory.stages)

    def decode(self, batch: float, context: float) -> DecodeStep:
        """One step at this many rows whose sequences have `context` tokens."""
        one, whole = self._decoding(batch / min(self.stages, batch), context), self._decoding(batch, context)
        slowest = max((self._stage(i, one) for i in self._distinct), key=lambda timed: timed.seconds)
        seconds = self.step_seconds(batch, context) / self.case.tokens_a_step
        parts = {name: part * seconds / slowest.seconds for name, part in slowest.parts.items()}
        least = max(self._stage(i, whole).least for i in self._distinct)
        return DecodeStep(batch, seconds, least / self.case.tokens_a_step, parts)

    def _decoding(self, rows: float, context: float) -> Pass:
        """Each row's last token and drafts. Sampling goes on while any row's drafts are right."""
        count = self.case.engine.drafts
        sampled = 1 + count * (1 - (1 - self.case.acceptance_rate) ** rows)
        return Pass(rows * (1 + count), rows, context, self.itemsize, count, sampled)

    def step_seconds(self, batch: float, context: float) -> float:
        """Of a step of `decode`. Rows are dealt into as many groups as there are stages, which each stage runs in turn
        (serve/staged_runner.py); with fewer rows than stages some of them wait."""
        groups = max(1.0, min(self.stages, batch))
        rows = batch / groups
        one = self._decoding(rows, context)
        turns = self._turns(one)
        return max(groups * max(turns), sum(turns) + self.stages * self._hop(one.tokens))

    def sent(self, stage: int, one: Pass) -> dict[str, dict[str, float]]:
        """Axes joined by "+" -> kind -> bytes that one device of a stage sends in one pass."""
        found: dict[str, Counter] = {}
        for work, count in self._works(stage, one):
            for sent in work.exchanged:
                found.setdefault("+".join(sent.axes), Counter())[sent.kind] += sent.nbytes * count
        return {axes: dict(kinds) for axes, kinds in found.items()}

    def _turns(self, one: Pass) -> list[float]:
        """Seconds of each stage."""
        found = {i: self._stage(i, one).seconds for i in self._distinct}
        return [found[self._like[i]] for i in range(self.stages)]

    @functools.cached_property
    def _like(self) -> list[int]:
        """The first stage with the same layers as each; the last one has the head."""
        last = self.stages - 1
        return [i if i == last else self._kinds.index(kinds) for i, kinds in enumerate(self._kinds)]

    @property
    def _distinct(self) -> set[int]:
        return set(self._like)

    def prefill(self, prompt_len: int, cached: int = 0) -> float:
        """Seconds of a prompt's images and chunks with nothing beside them, after those tokens that are cached. Chunks
        follow each other through the stages."""
        done, total = cached, self.images_seconds
        for count in self.chunks(prompt_len - cached):
            chunk = self.chunk(self.padded(count), done)
            total += chunk if done == cached else chunk / self.stages
            done += count
        return total

    @functools.cached_property
    def image_seconds(self) -> float:
        """Of the encoder for one of a prompt's images; 0 without."""
        images, case = self.case.images, self.case
        return image_seconds(images.image, case.cluster.gpu, jnp.dtype(case.dtype)) if images else 0.0

    @property
    def images_seconds(self) -> float:
        """The same of all of a prompt's, one after the other."""
        return self.case.images.count * self.image_seconds if self.case.images else 0.0

    def chunks(self, tokens: int, prompts: int = 1) -> Iterator[int]:
        """Of so many tokens of a prompt, where `prompts` are to be read at once."""
        sizes = self.memory.sizes
        cuts = sizes.cuts
        while tokens > 0:
            count = cuts.chunk(tokens, sizes.max_batch_tokens, prompts)
            yield count
            tokens -= count

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.case.dtype]

    def padded(self, count: int) -> int:
        """To the length of the shortest program that holds a chunk."""
        return min(n for _, n in self.memory.sizes.chunk_sizes if n >= count)

    @functools.lru_cache(maxsize=512)  # noqa: B019 - plans live as long as a command
    def chunk(self, tokens: int, before: int, rows: int = 1) -> float:
        """Seconds of a program of so many tokens in all rows, each after those before, through all stages in turn."""
        # Tokens that see those after them are read over pages (serve/runner.py).
        whole = self.case.images is not None and self.case.model.seen.sight.whole
        how = "pages" if whole else how_of(self.memory.sizes, tokens / rows, before)
        one = Pass(tokens, rows, before, self.itemsize, prompts=how)
        return sum(self._turns(one)) + (self.stages - 1) * self._hop(tokens)

    def _hop(self, tokens: float) -> float:
        """What leaves a stage, to the next one's devices."""
        if self.stages == 1:
            return 0.0
        mesh, cluster = of_replica(self.case.engine.mesh), self.case.cluster
        nbytes = tokens * self.case.model.shape.embed_dim * self.itemsize
        return Route.of(cluster.group(mesh, ("pipeline",)), cluster).seconds("collective-permute", nbytes, 1)

    def _stage(self, i: int, one: Pass) -> Timed:
        """One pass through a stage."""
        parts: Counter = Counter()
        least = 0.0
        for work, count in self._works(i, one):
            timed = self._timed(work)
            least += timed.least * count
            for name, seconds in timed.parts.items():
                parts[name] += seconds * count
        return Timed(dict(parts), least)

    def _works(self, i: int, one: Pass) -> list[tuple[Work, float]]:
        """(work, how often) of each kind of layer of a stage, and of the ends of the model, where they are there."""
        shape = self.case.model.shape
        D = shape.embed_dim
        found = [
            (self._of_layer(block, self._in_use[own], one), count) for (block, own), count in self._kinds[i].items()
        ]
        if shape.inputs:
            found.append((inputs_work(self._inputs, self.rules, one), 1))
        if shape.streams:
            found.append((_joined(shape.streams, D, one), 1))
        if shape.ngrams:
            found.append((ngrams_work(shape.ngrams, self.rules, one), 1))
        if i == self.stages - 1:
            found.append((ends_work(self._head, self.rules, one, shape.vocab_size, D), 1))
        if i == self.stages - 1 and self._drafter:
            decodes = one.drafts > 0
            found += (
                self._drafter.drafting(one.rows, one.context, one.itemsize) if decodes else self._drafter.reading(one)
            )
        return found

    def _of_layer(self, block: BlockConfig, in_use: Sequence[InUse], one: Pass) -> Work:
        cached, D = self._cached(block.attention), self.case.model.shape.embed_dim
        work = layer_work(block, in_use, self.rules, cached, one, D)
        if one.tokens > self._fused_rows:
            return work
        across = self.case.engine.mesh.size("tensor", "expert") > 1
        return dataclasses.replace(work, ops=tuple(fused(work.ops, block, across)))

    @functools.cached_property
    def _fused_rows(self) -> int:
        """Tokens up to which projections are fused; an engine that tries out which is quicker takes no longer."""
        return planned(self.case)

    @functools.cached_property
    def _kinds(self) -> list[Counter]:
        """(block, number of its weights among `_in_use`) -> how many such layers each stage has."""
        numbers = {id(own): i for i, own in enumerate(self._layers)}
        pairs = [
            (block, numbers[id(own)])
            for block, own in zip(self.case.model.shape.blocks(), self.weights.layers, strict=True)
        ]
        return [Counter(pairs[stage.layers]) for stage in self.memory.stages]

    @functools.cached_property
    def _layers(self) -> list[tuple[Held, ...]]:
        """Weights of layers that differ."""
        return list({id(own): own for own in self.weights.layers}.values())

    @functools.cached_property
    def _in_use(self) -> list[list[InUse]]:
        return [[InUse.of(held, self.rules) for held in own] for own in self._layers]

    @functools.cached_property
    def _head(self) -> InUse:
        (head,) = self.weights.beside["embedding" if self.weights.tied else "head"]
        return InUse.of(head, self.rules)

    @functools.cached_property
    def _inputs(self) -> list[InUse]:
        """Weights that make what each layer takes of a token."""
        return [InUse.of(held, self.rules) for held in self.weights.beside["layer_inputs"]]

    @functools.lru_cache(maxsize=512)  # noqa: B019 - plans live as long as a command
    def _cached(self, attention: AttentionConfig | MlaConfig | DeltaNetConfig) -> float:
        """Bytes of one position in a layer."""
        engine = self.case.engine
        how = engine.kv_cache_dtype, engine.decode_context_parallel_size
        model = one_layer(self.case.model.shape, of_stage(engine.mesh), self.case.dtype, *how)
        return cache_bytes(model, attention)

    @functools.cached_property
    def _drafter(self) -> Drafter | None:
        return drafter_of(self.case)

    @functools.cached_property
    def _kernels(self) -> Kernels:
        return Kernels.of(self.case.cluster.gpu)

    @functools.cached_property
    def _over_pages(self) -> Kernels:
        return Kernels.of(self.case.cluster.gpu, "triton")

    def _timed(self, work: Work) -> Timed:
        cluster, mesh = self.case.cluster, of_replica(self.case.engine.mesh)
        parts: Counter = Counter()
        for op in work.ops:
            kernels = self._over_pages if op.what == OVER_PAGES else self._kernels
            parts[op.layer] += kernel_seconds(op, kernels) * op.count
        for sent in work.exchanged:
            parts["+".join(sent.axes)] += exchanged_seconds(sent, mesh, cluster)
        return Timed(dict(parts), work.least_bytes / cluster.gpu.hbm_bytes_per_second)


def _joined(own: StreamsConfig | GatedStreamsConfig | AltUpConfig, D: int, one: Pass) -> Work:
    """Several streams at the ends of a model."""
    if isinstance(own, AltUpConfig):
        ops = tuple(altup.joined(own, D, one.tokens, one.itemsize))
        return Work(ops, (), altup.least_bytes(own, D, one.itemsize))
    joined = gated_streams.joined if isinstance(own, GatedStreamsConfig) else streams.joined
    return Work(tuple(joined(own, D, one.tokens, one.itemsize)), (), 0.0)


def exchanged_seconds(sent: Exchanged, mesh: MeshSpec, cluster: Cluster) -> float:
    """Of all of them, which are small: by latencies that NCCL assumes of small messages now."""
    route = Route.of(cluster.group(mesh, sent.axes), cluster)
    later = SMALL_SUMS[route.inside.name]
    inside = dataclasses.replace(route.inside, protocols={**route.inside.protocols, **later})
    return dataclasses.replace(route, inside=inside).seconds(sent.kind, sent.nbytes, sent.count)


def image_seconds(image: encoder.Image, gpu: Gpu, dtype: jnp.dtype) -> float:
    """Of an encoder's program for one image, on one device."""
    heads = [(image.config.tower.each,) * 2]
    fused = attention.choose("auto", Described.of(gpu), dtype, heads, trained=False) == "cudnn"
    kernels = Kernels.of(gpu)
    return sum(kernel_seconds(op, kernels) * op.count for op in encoder.operations(image, dtype.itemsize, fused))


FEW_BITS = (*EIGHT_BITS, "fp4")
SPLITS = (1, 2, 4, 8, 16)  # as XLA's autotuner tries for products of few rows (xla_gpu_enable_split_k_autotuning)


def kernel_seconds(op: Op, kernels: Kernels) -> float:
    """Of one execution. Products of few rows are cut along what is summed too, so that all cores load weights; reading
    and multiplying hide each other in part."""
    if op.unit != "matmul":
        return kernels.one_seconds(op)
    rows, n, k = op.dims
    copies = max(1, round(op.flops / (2.0 * rows * n * k)))
    rates = kernels.unhindered if op.dtype in FEW_BITS else kernels
    tiled = min(rates.tiled_seconds(rows, n, k / parts, copies * parts, op.dtype, tiles=FEW_ROWS) for parts in SPLITS)
    return (tiled**BOTH + (op.hbm_bytes / kernels.memory) ** BOTH) ** (1 / BOTH) + GAP
