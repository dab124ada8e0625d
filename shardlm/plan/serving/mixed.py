"""How long a step takes that reads prompts and decodes in one pass, as other engines' do: products of all tokens
together, attention of each. Of one pipeline stage, from shapes; what another engine runs otherwise, the caller says."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable

from shardlm.layers.block import BlockConfig
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.kv_format import KvFormat
from shardlm.plan.cluster import Cluster
from shardlm.plan.kernels import Kernels
from shardlm.plan.op import Op
from shardlm.plan.serving.closed import Step
from shardlm.plan.serving.ops import Pass, Work, ends_work, layer_work
from shardlm.plan.serving.time import exchanged_seconds, kernel_seconds
from shardlm.plan.serving.weights import InUse, cache_bytes, one_layer, weights_of
from shardlm.rules import Rules
from shardlm.serving_rules import serving_rules

DTYPE = "bfloat16"
ITEMSIZE = 2
SAME = 64  # positions before a prompt's tokens, and of replies, that make no difference that could be seen


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, for what it remembers
class Mixed:
    """layers  (block, its weights, how many such layers)
    cache      bytes of a position of one layer on a device
    held       bytes of weights on a device
    as_run     what another engine runs for one of our operations
    rereads    how often a reply's keys and values are read: 1 where heads that share them read them together
    """

    cluster: Cluster
    mesh: MeshSpec
    rules: Rules
    shape: TransformerConfig
    layers: tuple[tuple[BlockConfig, tuple[InUse, ...], int], ...]
    head: InUse
    cache: float
    held: float
    as_run: Callable[[Op], Iterable[Op]]
    rereads: float = 1.0

    @classmethod
    def of(
        cls,
        shape: TransformerConfig,
        cluster: Cluster,
        mesh: MeshSpec,
        kv_cache: KvFormat,
        share: float,
        as_run: Callable[[Op], Iterable[Op]],
        rereads: float = 1.0,
    ) -> "Mixed":
        """share: of the bytes that 16-bit projections and experts take, those that they are held in."""
        rules, weights = serving_rules(shape, mesh, "dtype"), weights_of(shape, mesh, DTYPE, "dtype")
        kinds: Counter = Counter(zip(shape.blocks(), weights.layers, strict=True))
        layers = tuple(
            (block, tuple(_held_in(InUse.of(held, rules), share) for held in own), count)
            for (block, own), count in kinds.items()
        )
        (head,) = weights.beside["embedding" if weights.tied else "head"]
        cache = cache_bytes(one_layer(shape, mesh, DTYPE, kv_cache))
        ends = sum(one.nbytes(rules.rest) for own in weights.beside.values() for one in own)
        held = sum(count * sum(one.nbytes for one in own) for _, own, count in layers) + ends
        return cls(cluster, mesh, rules, shape, layers, InUse.of(head, rules), cache, held, as_run, rereads)

    @property
    def reply_bytes(self) -> float:
        """Of a position of a request, in all layers, on a device."""
        return self.cache * self.shape.num_layers

    def seconds(self, step: Step) -> float:
        tokens, sampled = step.decoding, step.decoding
        total = self._attention(step.decoding, 1, _near(step.context)) if step.decoding else 0.0
        for part in step.parts:
            tokens, sampled = tokens + part.rows * part.tokens, sampled + part.rows * part.ends
            total += self._attention(part.rows, part.tokens, _near(part.before))
        layers = sum(self._layers(_rounded(tokens, 32)).values())
        return total + layers + sum(self._ends(_rounded(tokens, 8), _rounded(max(1, sampled), 8)).values())

    def parts(self, rows: int, context: float) -> dict[str, float]:
        """Seconds of a step of replies by what takes them: a layer's part (op.Layer), keys and values, links."""
        found = Counter(self._layers(rows))
        found.update(self._ends(rows, rows))
        return {**found, "keys and values": self._attention(rows, 1, _near(context))}

    @functools.lru_cache(maxsize=8192)  # noqa: B019 - lives as long as a command
    def _layers(self, tokens: int) -> dict[str, float]:
        """Of all that does not depend on contexts."""
        one, D = Pass(tokens, tokens, 0.0, ITEMSIZE), self.shape.embed_dim
        return self._timed(
            (layer_work(block, own, self.rules, 0.0, one, D), count) for block, own, count in self.layers
        )

    @functools.lru_cache(maxsize=8192)  # noqa: B019
    def _ends(self, tokens: int, rows: int) -> dict[str, float]:
        """Of the embedding, the head and sampling."""
        one = Pass(tokens, rows, 0.0, ITEMSIZE)
        return self._timed([(ends_work(self.head, self.rules, one, self.shape.vocab_size, self.shape.embed_dim), 1)])

    def _timed(self, works: Iterable[tuple[Work, int]]) -> dict[str, float]:
        found: Counter = Counter()
        for work, count in works:
            for op in work.ops:
                if op.unit == "attention":
                    continue
                for run in self.as_run(op):
                    found[run.layer] += count * run.count * kernel_seconds(run, self._kernels)
            for sent in work.exchanged:
                found["links"] += count * exchanged_seconds(sent, self.mesh, self.cluster)
        return dict(found)

    @functools.lru_cache(maxsize=65536)  # noqa: B019
    def _attention(self, rows: int, tokens: int, before: int) -> float:
        one, total = Pass(rows * tokens, rows, before, ITEMSIZE), 0.0
        cache = self.cache * (self.rereads if tokens == 1 else 1.0)
        for block, _, count in self.layers:
            for op in layer_work(block, (), self.rules, cache, one, self.shape.embed_dim).ops:
                if op.unit == "attention":
                    total += count * op.count * kernel_seconds(op, self._kernels)
        return total

    @functools.cached_property
    def _kernels(self) -> Kernels:
        return Kernels.of(self.cluster.gpu)


def _held_in(weight: InUse, share: float) -> InUse:
    """Projections and experts are held in few bits; norms and routers are not."""
    few = weight.summed and not weight.name.startswith("router")
    return dataclasses.replace(weight, nbytes=round(weight.nbytes * share)) if few else weight


def _near(context: float) -> int:
    return round(context / SAME) * SAME


def _rounded(count: int, share: int) -> int:
    """Few are what they are, many to one of `share` numbers before the next power of two, and to multiples of 16."""
    if count <= 64:
        return count
    step = max(16, 2 ** (count.bit_length() - 1) // share)
    return round(count / step) * step
