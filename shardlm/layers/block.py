"""One decoder block: attention and feed-forward, each with norms and around a residual."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from shardlm.layers.altup import AltUp, AltUpConfig, Laurel
from shardlm.layers.attention import Attention, AttentionConfig
from shardlm.layers.compressed_attention import CompressedAttention, CompressedConfig
from shardlm.layers.context import Context, Pages
from shardlm.layers.delta_net import DeltaNet, DeltaNetConfig
from shardlm.layers.fused import Late, norm_of, taken
from shardlm.layers.gated_streams import GatedStreams, GatedStreamsConfig
from shardlm.layers.hyper_connections import HyperConnection, StreamsConfig
from shardlm.layers.layer_inputs import LayerInput, LayerInputsConfig
from shardlm.layers.lightning import Lightning, LightningConfig
from shardlm.layers.mamba import Mamba, MambaConfig
from shardlm.layers.mla import Mla, MlaConfig
from shardlm.layers.mlp import Mlp, MlpConfig, NoMlpConfig
from shardlm.layers.moe import Moe, MoeConfig
from shardlm.layers.ngrams import Ngrams, NgramsConfig
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use
from shardlm.layers.short_conv import ShortConv, ShortConvConfig
from shardlm.layers.shortcut import ShortcutConfig, parted, together


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """norms      before each layer (pre; Llama, https://arxiv.org/abs/2302.13971), after it (post; OLMo 2,
               https://arxiv.org/abs/2501.00656, section 2.1), or both (Gemma 2, https://arxiv.org/abs/2408.00118);
               none where streams have their own
    post_norm  of those after, where it is another than of those before
    parallel   both layers read the stream after the same norm, and are added together (GPT-J; Cohere)
    norms_apart  then, each after a norm of its own (GPT-NeoX)
    residual_scale  factor on what is added to the stream (Granite)
    of_normed  what attention and the MLP make is added to the stream as they read it, after the norm, times this
               factor of attention's and of the MLP's (MiniMax-01); None: to the stream itself
    inputs     what the layer takes of each token besides the stream (layers/layer_inputs.py), added after its MLP
    out_scale  the stream is multiplied by a number that the checkpoint has, and that is not trained (Gemma 4)
    streams    there are several streams, mixed around both layers (layers/hyper_connections.py, gated_streams.py), or
               predicted and corrected (layers/altup.py), or the stream and what is added later (layers/shortcut.py)
    memory     Mamba 2 that reads the stream after the same norm as attention, and is added to it (Falcon H1)
    ngrams     what is added to several streams first, of each token and those before it (layers/ngrams.py)
    """

    attention: AttentionConfig | MlaConfig | DeltaNetConfig | CompressedConfig
    mlp: MlpConfig | MoeConfig | NoMlpConfig
    norms: Literal["pre", "post", "both", "none"] = "pre"
    residual_scale: float = 1.0
    parallel: bool = False
    norms_apart: bool = False
    inputs: LayerInputsConfig | None = None
    out_scale: bool = False
    streams: StreamsConfig | GatedStreamsConfig | AltUpConfig | ShortcutConfig | None = None
    ngrams: NgramsConfig | None = None
    memory: MambaConfig | None = None
    of_normed: tuple[float, float] | None = None
    post_norm: NormConfig | None = None

    @property
    def shares_norm(self) -> bool:
        """Whether both layers read the stream after the same norm."""
        return self.parallel and not self.norms_apart

    @property
    def mixers(self) -> tuple[AttentionConfig | MlaConfig | DeltaNetConfig | CompressedConfig, ...]:
        """What mixes tokens: attention, and what is beside it."""
        return (self.attention, self.memory) if self.memory else (self.attention,)

    @property
    def beside(self) -> str:
        """What attention reads beside the stream (AttentionConfig), "none" of other kinds."""
        return getattr(self.attention, "beside", "none")

    @property
    def mixes(self) -> bool:
        """Whether what layers make goes to several streams, by shares that are learned."""
        return self.streams is not None and not isinstance(self.streams, ShortcutConfig)

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights that take part in a matmul for each token."""
        around = (self.streams,) if isinstance(self.streams, AltUpConfig) else ()
        return sum(each.parameters_per_token(embed_dim) for each in (*self.mixers, self.mlp, *around))


class Block(nnx.Module):
    """x + post(attention(pre(x))), then x + post(mlp(pre(x))), with the norms that there are; weights "attention_norm",
    "attention_post_norm", "mlp_norm", "mlp_post_norm", and "beside_norm" of what attention reads beside; "memory"
    beside attention, if anything; with inputs "inputs", with an out_scale "out_scale" (1,), with several streams
    "attention_streams" and "mlp_streams", "attention_gates" and "mlp_gates", or "altup" and "laurel", and with n-grams
    "ngrams"."""

    def __init__(self, config: BlockConfig, embed_dim: int, out_scale: float, norm: NormConfig, params: Params):
        self.config = config
        attention = {
            AttentionConfig: Attention,
            MlaConfig: Mla,
            DeltaNetConfig: DeltaNet,
            MambaConfig: Mamba,
            LightningConfig: Lightning,
            ShortConvConfig: ShortConv,
            CompressedConfig: CompressedAttention,
        }
        attention = attention[type(config.attention)]
        feed_forward = Moe if isinstance(config.mlp, MoeConfig) else Mlp
        for name in ("attention", "mlp") if config.mlp.there else ("attention",):
            if config.norms in ("pre", "both") and not (config.shares_norm and name == "mlp"):
                setattr(self, f"{name}_norm", Norm(norm, embed_dim, params))
            if name == "attention":
                self.attention = attention(config.attention, embed_dim, out_scale, params)
                if config.beside != "none":
                    self.beside_norm = Norm(norm, embed_dim, params)
                if config.memory:
                    self.memory = Mamba(config.memory, embed_dim, out_scale, params)
            else:
                self.mlp = feed_forward(config.mlp, embed_dim, out_scale, params)
            if config.norms in ("post", "both"):
                setattr(self, f"{name}_post_norm", Norm(config.post_norm or norm, embed_dim, params))
        if config.ngrams:
            self.ngrams = Ngrams(config.ngrams, embed_dim, params)
        if isinstance(config.streams, GatedStreamsConfig):
            self.attention_gates, self.mlp_gates = (GatedStreams(config.streams, embed_dim, params) for _ in range(2))
        elif isinstance(config.streams, AltUpConfig):
            self.altup, self.laurel = (
                AltUp(config.streams, embed_dim, params),
                Laurel(config.streams, embed_dim, params),
            )
        elif isinstance(config.streams, StreamsConfig):
            self.attention_streams, self.mlp_streams = (
                HyperConnection(config.streams, embed_dim, params) for _ in range(2)
            )
        if config.inputs:
            self.inputs = LayerInput(config.inputs, embed_dim, norm, params)
        if config.out_scale:
            self.out_scale = params((1,), ("norm",), constant(1.0))

    def __call__(
        self, x: jax.Array, positions: jax.Array, ctx: Context, pages: Pages | None, layer, execution: Execution
    ) -> tuple[jax.Array, Pages | None, dict[str, jax.Array]]:
        """x [B, T, D], positions int32 [B, T]; returns (x, pages, auxiliary values by name: a mixture's, and keys
        and values that later layers read)."""
        x = checkpoint_name(x, "block_input")
        if isinstance(self.config.streams, AltUpConfig):
            return self._of_predicted(x, positions, ctx, pages, layer, execution)
        if isinstance(self.config.streams, ShortcutConfig):
            return self._of_shortcut(x, positions, ctx, pages, layer, execution)
        if self.config.streams:
            return self._of_streams(x, positions, ctx, pages, layer, execution)
        first = self.before(x, "attention", execution)
        if self.config.beside != "none":
            x, first = self._with_beside(x, taken(first), ctx, execution)
        h, pages, kept = self.attention(first, positions, ctx, pages, layer, execution)
        if self.config.memory:
            remembered, pages, _ = self.memory(taken(first), positions, ctx, pages, layer, execution)
            h = h + remembered
        stream, x = x, self._onto(self._stream(x, first, 0), h, "attention", execution)
        aux = {}
        if self.config.mlp.there:
            if not self.config.shares_norm:
                first = self.before(stream if self.config.parallel else x, "mlp", execution)
            h, aux = self.mlp(first if _takes_late(self.mlp) else taken(first), ctx, execution, x)
            x = self._onto(self._stream(x, first, 1), h, "mlp", execution)
        if self.config.inputs:
            own = jax.lax.dynamic_index_in_dim(ctx.inputs, layer, keepdims=False)
            x = x + self.inputs(x, own, execution)
        if self.config.out_scale:
            x = x * jax.lax.stop_gradient(in_use(self.out_scale, execution))
        return x if ctx.seen is None else ctx.seen.after(x, layer), pages, aux | kept

    def _with_beside(self, x, first, ctx: Context, execution: Execution) -> tuple[jax.Array, jax.Array]:
        """(what attention's output is added to, what attention reads [B, T, 2 * D]) of the stream and its norm."""
        both = jnp.concatenate([self.beside_norm(ctx.inputs[0], execution), first], axis=-1)
        return first if self.config.beside == "normed" else x, both

    def _of_streams(self, x, positions, ctx: Context, pages, layer, execution: Execution):
        if self.config.ngrams:
            made, pages = self.ngrams(x, positions, ctx, pages, execution)
            x = x + made
        end = "gates" if isinstance(self.config.streams, GatedStreamsConfig) else "streams"
        around_attention, around_mlp = (getattr(self, f"{name}_{end}") for name in ("attention", "mlp"))
        read, weights = around_attention.before(x, execution)
        h, pages, kept = self.attention(
            self.before(read, "attention", execution), positions, ctx, pages, layer, execution
        )
        x = around_attention.after(x, checkpoint_name(h, "attention_out"), weights)
        read, weights = around_mlp.before(x, execution)
        h, aux = self.mlp(self.before(read, "mlp", execution), ctx, execution, read)
        return around_mlp.after(x, checkpoint_name(h, "mlp_out"), weights), pages, aux | kept

    def _of_shortcut(self, x, positions, ctx: Context, pages, layer, execution: Execution):
        x, later = parted(x)
        h, pages, kept = self.attention(self.before(x, "attention", execution), positions, ctx, pages, layer, execution)
        x = self._onto(x, h, "attention", execution)
        h, aux = self.mlp(self.before(x, "mlp", execution), ctx, execution, x)
        if self.config.mlp.num_experts:
            h, later = parted(h)
            return together(self._onto(x, h, "mlp", execution), later), pages, aux | kept
        x = self._onto(x, h, "mlp", execution) + later
        return together(x, later), pages, aux | kept

    def _of_predicted(self, x, positions, ctx: Context, pages, layer, execution: Execution):
        active, predicted = self.altup.before(x, execution)
        first = self.before(active, "attention", execution)
        h, pages, kept = self.attention(first, positions, ctx, pages, layer, execution)
        h = self._onto(active, h, "attention", execution)
        h = (h + self.laurel(taken(first), execution)) / math.sqrt(2)
        made, aux = self.mlp(self.before(h, "mlp", execution), ctx, execution, h)
        x = self.altup.after(predicted, self._onto(h, made, "mlp", execution), execution)
        own = jax.lax.dynamic_index_in_dim(ctx.inputs, layer, keepdims=False)
        x = self.altup.with_inputs(x, self.inputs(self.altup.gate_of(x, execution), own, execution))
        return x, pages, aux | kept

    def before(self, x: jax.Array, layer: str, execution: Execution) -> jax.Array | Late:
        """What "attention" or "mlp" reads of the stream [B, T, D]."""
        if self.config.norms in ("post", "none"):
            return x
        norm = getattr(self, f"{layer}_norm")
        return norm_of(x, norm, execution) if _takes_late(getattr(self, layer)) else norm(x, execution)

    def _stream(self, x: jax.Array, read: jax.Array | Late, place: int) -> jax.Array:
        """What is added to, of the stream [B, T, D] and what was read of it: attention's in place 0, the MLP's in 1."""
        return x if self.config.of_normed is None else taken(read) * self.config.of_normed[place]

    def _onto(self, x: jax.Array, h: jax.Array, layer: str, execution: Execution) -> jax.Array:
        """The stream with what "attention" or "mlp" makes, after its norm and its factor."""
        if self.config.norms in ("post", "both"):
            h = getattr(self, f"{layer}_post_norm")(h, execution)
        if self.config.residual_scale != 1:
            h = h * self.config.residual_scale
        return x + checkpoint_name(h, f"{layer}_out")


def _takes_late(layer: nnx.Module) -> bool:
    """Whether a layer takes the norm of what it reads itself."""
    return getattr(layer, "takes_late", False)
