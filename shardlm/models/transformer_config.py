"""The shape of a decoder, and what follows from it: which layers keep and share what, and what a token takes of weights
and of multiply-adds. Architectures build it, plans count by it; the decoder itself is transformer.py's."""

import dataclasses
import functools
import math

from shardlm.errors import ShardlmError
from shardlm.flops import attention_width
from shardlm.layers.altup import AltUpConfig
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.eagle import EagleConfig
from shardlm.layers.gated_streams import GatedStreamsConfig
from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.indexer import IndexerConfig
from shardlm.layers.layer_inputs import LayerInputsConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mtp import MtpConfig
from shardlm.layers.ngrams import NgramsConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.shortcut import ShortcutConfig
from shardlm.layers.stack import Segment
from shardlm.ops.cross_entropy import LogitsConfig
from shardlm.ops.rope import Rope


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder. Architectures (models/llama.py, ...) build it from their own, familiar fields.

    embed_scale    factor on the embedding (Gemma, Granite)
    embed_norm     the embedding has a norm before the first layer (BLOOM; nanochat's has no scale)
    logits         what becomes of the output head's products
    max_positions  learned positions that are added to the embedding (GPT-2); 0: none
    first_position  row of their table that a text's first token has (OPT: 2)
    head_bias      the output head has a bias (Phi 2)
    mtp            modules that predict further tokens (layers/mtp.py)
    eagle          it is a head that drafts for another decoder, by that one's streams (layers/eagle.py)
    inputs         what each layer takes of each token besides the stream (layers/layer_inputs.py)
    streams        there are several streams, mixed around every layer (layers/hyper_connections.py, gated_streams.py)
                   or predicted and corrected (layers/altup.py), or what is added later (layers/shortcut.py)
    frequencies    so many of the rotations of all layers have a learned logarithm of a factor on each; 0: they are not
                   learned (Mistral Large 4)
    final_norm     there is a norm behind the last layer; else streams have their own
    last_norm      that norm, where it is another than of layers
    """

    vocab_size: int
    embed_dim: int
    segments: tuple[Segment, ...]
    norm: NormConfig = NormConfig()
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    embed_norm: NormConfig | None = None
    logits: LogitsConfig = LogitsConfig()
    max_positions: int = 0
    first_position: int = 0
    head_bias: bool = False
    mtp: MtpConfig | None = None
    eagle: EagleConfig | None = None
    inputs: LayerInputsConfig | None = None
    streams: StreamsConfig | GatedStreamsConfig | AltUpConfig | ShortcutConfig | None = None
    final_norm: bool = True
    frequencies: int = 0
    last_norm: NormConfig | None = None

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("vocab_size", "embed_dim", "num_layers")}
        if min(sizes.values()) < 1 or any(segment.repeats < 0 for segment in self.segments):
            raise ShardlmError(f"{', '.join(f'{name}={n}' for name, n in sizes.items())}: each must be at least 1")
        if self.both and not all(block.memory for block in self.kinds):
            raise ShardlmError("some layers have Mamba 2 beside attention and others have not: give it to all, or none")

    @property
    def num_layers(self) -> int:
        return sum(segment.num_layers for segment in self.segments)

    @property
    def head_size(self) -> int:
        """Tokens that the output head has logits of."""
        return self.eagle.vocab_size if self.eagle else self.vocab_size

    @property
    def cached_layers(self) -> int:
        """Layers that keep something of a text: those of the modules behind the decoder are the last."""
        return self.num_layers + (self.mtp.depth if self.mtp else 0)

    def blocks(self):
        """The configuration of each layer, first to last."""
        for segment in self.segments:
            yield from segment.pattern * segment.repeats

    @functools.cached_property
    def kinds(self) -> tuple[BlockConfig, ...]:
        """Those that differ, of layers and modules that predict further tokens: of a hundred layers one or a few."""
        blocks = [block for segment in self.segments for block in segment.pattern]
        return tuple(dict.fromkeys([*blocks, self.mtp.block] if self.mtp and self.mtp.depth else blocks))

    def attentions(self):
        """Of each layer and module that attends to tokens, whose keys and values are kept."""
        return (b.attention for b in self.all_blocks() if not isinstance(b.attention, DeltaNetConfig))

    @functools.cached_property
    def attention_kinds(self) -> tuple[AttentionConfig | MlaConfig, ...]:
        """Those of them that differ."""
        return tuple(dict.fromkeys(k.attention for k in self.kinds if not isinstance(k.attention, DeltaNetConfig)))

    @functools.cached_property
    def rotations(self) -> tuple[tuple[Rope, int], ...]:
        """(a rotation, the width of the heads that it turns): those of usual attention that differ."""
        usual = (kind for kind in self.attention_kinds if isinstance(kind, AttentionConfig) and kind.rope)
        return tuple(dict.fromkeys((kind.rope, kind.head_dim) for kind in usual))

    @functools.cached_property
    def memories(self) -> tuple[int, ...]:
        """The layers that keep none: they remember a text by arrays of one size."""
        return tuple(i for i, b in enumerate(self.blocks()) if isinstance(b.attention, DeltaNetConfig))

    @functools.cached_property
    def remembers(self) -> bool:
        """Whether any layer remembers a text so, those with pages too among them."""
        return bool(self.memories) or self.both

    @functools.cached_property
    def both(self) -> bool:
        """Whether layers, which are all of them then, keep something of tokens and remember texts so."""
        return any(block.memory for block in self.kinds)

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """Of each layer, whose keys and values it attends to: its own, or those of one before it. Of modules that
        predict further tokens too."""
        keepers, found = {}, []
        for layer, block in enumerate(self.all_blocks()):
            own = block.attention
            found.append(keepers[own.reads] if getattr(own, "reads", "") else layer)
            keepers |= {own.keeps: layer} if getattr(own, "keeps", "") else {}
        return tuple(found)

    @property
    def reads(self) -> bool:
        """Whether any layer attends to another's."""
        return self.sources != tuple(range(len(self.sources)))

    @functools.cached_property
    def sparse(self) -> bool:
        """Whether indexers choose the tokens that queries attend to."""
        return any(_indexer(block) for block in self.kinds)

    @functools.cached_property
    def shared_choice(self) -> int:
        """How many tokens are chosen at a time, where layers share what an indexer before them chose; 0: none do."""
        return max((own.top_k for block in self.kinds if (own := _indexer(block)) and own.shared), default=0)

    @functools.cached_property
    def compressed(self) -> bool:
        """Whether queries attend to entries that stand for several tokens (layers/compressed_attention.py)."""
        return any(isinstance(block.attention, CompressedConfig) for block in self.kinds)

    @functools.cached_property
    def rows(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each layer of such a model, the rows that it keeps in pages (layers/page_layout.py, layout_of_rows)."""
        return tuple(block.attention.rows for block in self.blocks()) if self.compressed else ()

    @functools.cached_property
    def hashed(self) -> bool:
        """Whether experts of some layers go by the token."""
        return any(getattr(block.mlp, "hashed", 0) for block in self.kinds)

    @functools.cached_property
    def ngrams(self) -> tuple[NgramsConfig, ...]:
        """Of the layers that have rows of n-grams (layers/ngrams.py), in order."""
        return tuple(block.ngrams for block in self.blocks() if block.ngrams)

    @functools.cached_property
    def kept_heads(self) -> frozenset[tuple[int, int]]:
        """(kv heads, numbers of one) of the layers that keep keys and values of heads."""
        kinds = (block.attention for block in self.kinds)
        return frozenset((a.num_kv_heads, a.head_dim) for a in kinds if isinstance(a, AttentionConfig))

    def kept_numbers(self, ways: int) -> dict[tuple[int, int], int]:
        """By those, numbers of a token's keys over `ways` devices that split heads: where some layers have too few to
        split and others not, each device keeps the one that its queries read."""
        split = any(heads % ways == 0 for heads, _ in self.kept_heads)
        return {(heads, width): (ways if split and heads % ways else heads) * width for heads, width in self.kept_heads}

    def sharing(self, ways: int) -> tuple[int, ...]:
        """Of each layer, how many like it have room in one place of a page (layers/page_layout.py); (): one."""
        if len(self.kept_heads) < 2:
            return ()
        numbers, attentions = self.kept_numbers(ways), [block.attention for block in self.all_blocks()]
        most = math.lcm(*numbers.values())
        own = (numbers[a.num_kv_heads, a.head_dim] if isinstance(a, AttentionConfig) else most for a in attentions)
        return tuple(most // each for each in own)

    def all_blocks(self):
        """The same, and then of the modules that predict further tokens."""
        yield from self.blocks()
        yield from (self.mtp.block,) * self.mtp.depth if self.mtp else ()

    def apart(self) -> "TransformerConfig":
        """The same, each layer a segment of its own."""
        return dataclasses.replace(self, segments=tuple(Segment((block,), 1) for block in self.blocks()))

    def check_stages(self, count: int) -> None:
        """Refuses pipelines of models whose layers need more than the stream of the one before."""
        needs = {
            "read the keys and values of others": self.reads,
            "have inputs of their own, made of the embedding": self.inputs,
            "attend to what others chose": self.shared_choice,
            "turn by frequencies that are learned": self.frequencies,
            "look at the tokens themselves": self.hashed or self.ngrams,
            "keep rows of several kinds in pages": self.compressed,
            "have several streams, or what is added later, between them": self.streams is not None,
        }
        what = next((what for what, needed in needs.items() if needed), "")
        if count > 1 and what:
            raise ShardlmError(
                f"pipeline={count}: layers of the model {what}, which stages do not send on; set pipeline to 1 and "
                "give its devices to tensor, fsdp or data"
            )

    def without_mtp(self) -> "TransformerConfig":
        """The decoder alone."""
        return dataclasses.replace(self, mtp=None)

    def pipelined_segment(self) -> int:
        """Index of the segment with the most repeats: the one that runs in pipeline stages."""
        if len(self.segments) == 1:  # a planner asks half a million times
            return 0
        return max(range(len(self.segments)), key=lambda i: self.segments[i].repeats)

    def widths(self) -> dict[str, set[int]]:
        """Sizes of the dimensions by which weights are spread over devices that see other tokens (rules.py)."""
        attentions = {block.attention for block in self.kinds}
        latents = {n for a in attentions if isinstance(a, MlaConfig) for n in (a.q_latent_dim, a.kv_latent_dim) if n}
        compressed = [a for a in attentions if isinstance(a, CompressedConfig)]
        latents |= {n for a in compressed for n in (a.q_latent_dim, a.out_latent_dim)}
        latents |= {a.head_dim for a in attentions if isinstance(a, DeltaNetConfig) and a.latents}
        beside = {self.inputs.dim} if self.inputs else set()
        beside |= {self.eagle.reads} if self.eagle else set()
        beside |= {n for own in self.ngrams for n in (own.width, own.dim)}
        expert = {getattr(block.mlp, "latent_dim", 0) or self.embed_dim for block in self.kinds}
        return {"embed": {self.embed_dim} | beside, "expert_embed": expert, "latent": latents}

    def parameters_per_token(self) -> int:
        """Weights that take part in a matmul for each token: all layers and the output head, not the embedding; and
        the same of modules that predict further tokens."""
        layers = sum(block.parameters_per_token(self.embed_dim) for block in self.blocks())
        head = self.head_size * self.embed_dim
        layers += self.eagle.reads * self.embed_dim if self.eagle else 0
        if self.inputs:  # made of the embedding, and each layer's gate and projection back
            layers += 3 * self.num_layers * self.embed_dim * self.inputs.dim
        layers += sum(own.parameters_per_token(self.embed_dim) for own in self.ngrams)
        if isinstance(self.streams, GatedStreamsConfig):
            of_layer = self.streams.parameters_per_token(self.embed_dim)
            layers += 2 * self.num_layers * of_layer + self.streams.parameters_per_token(self.embed_dim, adds=False)
        if isinstance(self.streams, AltUpConfig):
            layers += 2 * (self.streams.count - 1) * self.embed_dim**2
        further = self.mtp.depth * (self.mtp.parameters_per_token(self.embed_dim) + head) if self.mtp else 0
        return layers + head + further

    def attention_width(self) -> int:
        """Multiply-adds of one (query, key) pair in all layers together that see all of them (flops.py)."""
        every = (a for a in self.attentions() if not isinstance(a, CompressedConfig))
        return sum(attention_width(a.num_heads, a.head_dim, a.value_dim) for a in every)

    def attention_macs(self, pairs: float, tokens: float) -> float:
        """Multiply-adds of all layers for so many tokens and the (query, key) pairs among them (flops.py)."""
        linear = [a for b in self.all_blocks() for a in b.mixers if isinstance(a, DeltaNetConfig)]
        compressed = (a.macs(pairs, tokens) for a in self.attentions() if isinstance(a, CompressedConfig))
        return pairs * self.attention_width() + sum(compressed) + tokens * sum(a.macs_per_token() for a in linear)


def _indexer(block: BlockConfig) -> IndexerConfig | None:
    return getattr(block.attention, "indexer", None)
