"""The mixture of experts: router, experts over the `expert` axis, shared experts, and what is reported of them.
Routing is ops/routing.py's, moving tokens ops/expert_dispatch.py's, the experts' matmuls ops/grouped_matmul.py's.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.layers.context import Context
from shardlm.layers.mlp import Mlp, MlpConfig
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import (
    Execution,
    Params,
    constant,
    drawn,
    has_kernel,
    held_parts,
    in_groups,
    in_use,
    made_anew,
    normal,
    parts_of,
    project,
    whole_groups,
)
from shardlm.layers.shortcut import together
from shardlm.mesh import shard_map
from shardlm.ops import expert_dispatch, grouped_matmul, routing
from shardlm.ops.anew_matmul import anew_experts
from shardlm.ops.expert_dispatch import Dispatch, run_experts
from shardlm.ops.grouped_weights import FEW_ROWS_OF_EXPERT, Grouped, expert_product
from shardlm.ops.routing import Router
from shardlm.ops.swiglu import Activation, activate, gated

LOSSES = ("balance_loss", "router_z_loss")  # of the auxiliary values, those that are part of the loss


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts.

    num_experts, top_k  experts, and how many of them a token goes to
    expert_dim          width of one expert
    shared_dim          width of what every token goes through besides (DeepSeek's shared experts together); 0: none
    shared_gate         that is multiplied by the sigmoid of a product with the token (Qwen 2 MoE, Qwen3-Next)
    shared_scale        factor on it (a half in Command A's mixture, which averages)
    router              how scores become choices
    balance_loss        weight of the load-balance loss of each row (ops/routing.py, row_balance)
    router_z_loss       weight of the squared log-partition of the router (https://arxiv.org/abs/2202.08906, eq. 5)
    activation          of the experts (ops/swiglu.py)
    limit, shared_limit  of both factors of an expert, and of the shared one (ops/swiglu.py); 0: none
    bias                experts and router have biases (GPT-OSS)
    apart               router and experts read the stream after a norm of their own each, and what the experts and the
                        shared one make has a norm too, before it is added; each expert has a factor on its weight
                        (Gemma 4)
    norm                those norms
    weighs_inputs       a token is multiplied by its expert's weight before the expert, not after it (Llama 4)
    gated               experts and the shared one are, as SwiGLU is; else they are an activation between two products
    latent_dim          experts read and make a projection of the stream of this width (Nemotron 3's larger ones); 0:
                        the stream
    load_bias           a bias in the choice that evens the load without a loss (ops/routing.py, with_load)
    later               what experts make is not added to what the shared one makes, but given beside it: twice as many
                        numbers (layers/shortcut.py)
    idle                of all that a router chooses from, so many behind the experts give back what they read
                        (zero-computation experts, https://arxiv.org/abs/2509.01322, section 2.1)
    hashed              experts go by the token, by a table that is not trained, of so many tokens; 0: by scores
                        (DeepSeek V4's first layers)
    capacity_factor     limit on the pairs that one device takes from the others (ops/expert_dispatch.py); 0: none, no
                        token is dropped
    """

    num_experts: int
    top_k: int
    expert_dim: int
    shared_dim: int = 0
    shared_gate: bool = False
    shared_scale: float = 1.0
    router: Router = Router()
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    activation: Activation = "silu"
    limit: float = 0.0
    shared_limit: float = 0.0
    bias: bool = False
    apart: bool = False
    norm: NormConfig = NormConfig()
    gated: bool = True
    latent_dim: int = 0
    load_bias: bool = False
    weighs_inputs: bool = False
    hashed: int = 0
    later: bool = False
    idle: int = 0
    capacity_factor: float = 0.0

    there = True

    def __post_init__(self):
        routing.check_router(self.router, self.choices, self.top_k)
        if not self.gated and (self.bias or self.limit or self.shared_limit):
            raise ShardlmError("gated=False: experts without gates have no biases and no limits; set those to none")
        if self.weighs_inputs and self.top_k > 1:
            raise ShardlmError(
                f"top_k={self.top_k}: tokens are multiplied by their expert's weight before it, which is there for one "
                "expert a token (num_experts_per_tok=1, as in Llama 4's published checkpoints)"
            )
        if self.capacity_factor and self.capacity_factor < 1:
            raise ShardlmError(
                f"capacity_factor={self.capacity_factor} drops tokens even under an even load; choose at least 1, or 0 "
                "to drop none"
            )

    @property
    def choices(self) -> int:
        """What a router chooses from."""
        return self.num_experts + self.idle

    @property
    def working(self) -> float:
        """Of a token's choices, those that are experts which compute, under an even load."""
        return self.top_k * self.num_experts / self.choices

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the hidden layers, each split over the tensor axis."""
        return tuple(filter(None, (self.expert_dim, self.shared_dim)))

    @property
    def projections(self) -> tuple[str, ...]:
        """Of an expert."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def read_dim(self, embed_dim: int) -> int:
        """How wide what experts read is."""
        return self.latent_dim or embed_dim

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights that one token passes: its experts, the shared ones and the router."""
        experts = self.read_dim(embed_dim) * self.top_k * self.num_experts * self.expert_dim // self.choices
        of_hidden = len(self.projections) * (experts + embed_dim * self.shared_dim)
        return of_hidden + embed_dim * (self.choices + self.shared_gate + 2 * self.latent_dim)


class Moe(nnx.Module):
    """Sum over a token's experts of weight times expert(x), plus the shared expert; weights "router" (D, E), where some
    are idle E + Z, as in all that is of the router, "gate" and
    "up" (E, D, F), "down" (E, F, D), and "router_bias" (E,) where the load is evened by it; with biases "logit_bias"
    (E,), "gate_bias" and "up_bias" (E, F), "down_bias" (E, D); "shared" (layers/mlp.py) and its "shared_gate" (D,);
    where experts read a latent "latent_down" (D, L) and "latent_up" (L, D), and L in D's place in theirs; where they
    are not gated there is no "gate"; where tokens are hashed "experts_of_token" (V, k); where both are apart
    "router_norm", "before_norm", "after_norm", "shared_norm" and "expert_scale" (E,)."""

    def __init__(self, config: MoeConfig, embed_dim: int, out_scale: float, params: Params):
        D, E, F, L = embed_dim, config.num_experts, config.expert_dim, config.read_dim(embed_dim)
        self.config = config
        if config.latent_dim:
            params.weight(self, "latent_down", (D, L), ("embed", "latent_whole"), normal(D**-0.5))
            params.weight(self, "latent_up", (L, D), ("latent_whole", "embed"), normal(L**-0.5))
        self.router = params((D, config.choices), ("embed", "router"), normal(D**-0.5))
        for name in config.projections[:-1]:
            params.projection(self, name, (E, L, F), ("experts", "expert_embed", "expert_mlp"), normal(L**-0.5), into=2)
        out_init = normal(out_scale * F**-0.5)
        params.projection(self, "down", (E, F, L), ("experts", "expert_mlp", "expert_embed"), out_init, into=2)
        if config.bias:
            self.logit_bias = params((E,), ("router",), constant(0.0))
            self.gate_bias = params((E, F), ("experts", "expert_mlp"), constant(0.0))
            self.up_bias = params((E, F), ("experts", "expert_mlp"), constant(0.0))
            self.down_bias = params((E, D), ("experts", "norm"), constant(0.0))
        if config.hashed:
            self.experts_of_token = params((config.hashed, config.top_k), ("norm", "norm"), _hashed(E))
        if config.load_bias:
            self.router_bias = params((config.choices,), ("router",), constant(0.0))
        if config.shared_dim:
            inside = dataclasses.replace(params, place=f"{params.place}shared.")
            cut = config.activation == "silu_of_cut" and not config.shared_limit
            activation = "silu" if cut else config.activation
            own = MlpConfig(config.shared_dim, activation, config.gated, limit=config.shared_limit)
            self.shared = Mlp(own, embed_dim, out_scale, inside)
        if config.shared_gate:
            self.shared_gate = params((D,), ("norm",), normal(D**-0.5))
        if config.apart:
            self.router_norm, self.before_norm, self.after_norm, self.shared_norm = (
                Norm(config.norm, D, params) for _ in range(4)
            )
            self.expert_scale = params((E,), ("router",), constant(1.0))

    def __call__(
        self, x: jax.Array, ctx: Context, execution: Execution, stream: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [B, T, D], the sequence split as between blocks -> (x's shape and split, auxiliary values): the losses
        "balance_loss" and "router_z_loss", weighted by config and tokens (ctx.weights), and the counts "expert_load"
        [E], pairs of real tokens, and "dropped". `stream`: x before its norm, which experts apart read."""
        if not self.config.apart:
            if not self.config.latent_dim:
                return self._mixed({"experts": x}, x, ctx, execution)
            latent = project("btd,dl->btl", x, self, "latent_down", execution)
            return self._mixed({"experts": latent, "router": x}, x, ctx, execution)
        assert stream is not None, "the block gives it"
        router_reads = self.router_norm(stream, execution) * jnp.asarray(stream.shape[-1] ** -0.5, stream.dtype)
        reads = {"experts": self.before_norm(stream, execution), "router": router_reads}
        return self._mixed(reads, x, ctx, execution)

    def _mixed(self, reads: dict[str, jax.Array], shared_reads: jax.Array, ctx: Context, execution: Execution):
        """What experts, router and shared expert make of what each reads, [B, T, D]; the router reads what experts do
        where it has nothing of its own."""
        config, act = self.config, execution.rules.act
        of_x, tokens = act.spec("batch", "seq", "embed"), act.spec("batch", "seq")
        routed = {"router": jax.reshard(self.router[...], PartitionSpec(None, None))}
        if config.load_bias:
            routed["bias"] = self.router_bias[...]
        if config.apart:
            routed["expert_scale"] = jax.reshard(self.expert_scale[...], PartitionSpec(None))
        if config.hashed:
            table = jax.lax.stop_gradient(jax.reshard(self.experts_of_token[...], PartitionSpec(None, None)))
            chosen = table.at[ctx.tokens].get(out_sharding=act.spec("batch", "whole_seq", None))
            reads = reads | {"chosen": jax.reshard(chosen, act.spec("batch", "seq", None))}
        experts, few, anew = {}, {}, {}
        rows = math.prod(shared_reads.shape[:2]) * config.top_k / config.num_experts  # of an expert, on average
        for name in config.projections:
            param = getattr(self, name)
            if in_groups(param) is None:
                experts[name] = in_use(param, execution)
                continue
            if not whole_groups(self, name, execution):  # which a device alone cannot make its part of
                experts[name] = made_anew(self, name, execution)
                continue
            by_kernel = rows <= FEW_ROWS_OF_EXPERT or execution.few_bits == "looped"
            by_kernel = by_kernel and has_kernel(self, name, execution)
            (few if by_kernel else anew)[name] = in_groups(param)
            experts |= held_parts(self, name, execution)
        if config.bias:
            routed["logit_bias"] = jax.reshard(self.logit_bias[...], PartitionSpec(None))
            biases = ("gate_bias", "up_bias", "down_bias")
            experts |= {name: in_use(getattr(self, name), execution) for name in biases}
        use = execution.rules.use
        specs = {name: use.spec(*getattr(self, name).get_metadata("names")) for name in experts}
        real = jax.reshard(ctx.real, tokens)
        weights = jnp.zeros_like(real, jnp.float32) if ctx.weights is None else jax.reshard(ctx.weights, tokens)
        local = functools.partial(_local, config, self.dispatch(execution), execution, few, anew)
        aux = dict.fromkeys(("balance_loss", "router_z_loss", "dropped"), PartitionSpec())
        out, aux = shard_map(
            local,
            in_specs=(dict.fromkeys(reads, of_x), tokens, tokens, PartitionSpec(), specs),
            out_specs=(of_x, aux | {"expert_load": PartitionSpec()}),
        )(reads, real, weights, routed, experts)
        if config.latent_dim:
            out = project("btl,ld->btd", out, self, "latent_up", execution)
        if config.apart:
            out = self.after_norm(out, execution)
        if config.shared_dim:
            shared = self.shared(shared_reads, ctx, execution)[0]
            if config.shared_gate:
                shared = shared * jax.nn.sigmoid(shared_reads @ in_use(self.shared_gate, execution))[..., None]
            if config.shared_scale != 1:
                shared = shared * config.shared_scale
            if config.apart:
                shared = self.shared_norm(shared, execution)
            out = together(shared, out) if config.later else out + shared
        return out, aux

    def dispatch(self, execution: Execution) -> Dispatch:
        """How tokens reach their experts on this mesh."""
        return dispatch_of(self.config, execution)


def dispatch_of(config: MoeConfig, execution: Execution) -> Dispatch:
    ranks = execution.rules.mesh.expert if execution.rules.use.axes("experts") else 1
    split = "expert" in execution.rules.act.axes("batch")
    exchange = expert_dispatch.choose(ranks, config.top_k, split, execution.gathers_tokens)
    ragged = execution.grouped_matmul == "tokamax"
    return Dispatch(config.num_experts, ranks, exchange, config.capacity_factor, ragged)


def _hashed(num_experts: int):
    """A table of a model from nothing: the experts of each token, one after the other from a random one on."""

    def draw(key, shape, spec):
        first = jax.random.randint(key, (*shape[:-1], 1), 0, num_experts, out_sharding=spec)
        return ((first + jnp.arange(shape[-1])) % num_experts).astype(jnp.float32)

    return drawn(draw)


def _local(
    config: MoeConfig, dispatch: Dispatch, execution: Execution, few, anew, reads, real, weights, routed, experts
):
    """One device: its part of what is read [B, T, D] by "experts" and, where that is something else, by the "router",
    real bool and weights float32 [B, T]. By name the Groups of the experts' weights that the kernel reads as they are
    held, `few`, and of those that are made `anew`."""
    act, x = execution.rules.act, reads["experts"]
    router_reads = reads.get("router", x)
    B, T, D = x.shape
    k, E, C = config.top_k, config.num_experts, config.choices
    logits = jnp.einsum("btd,de->bte", router_reads.astype(jnp.float32), routed["router"], precision="highest")
    if config.bias:
        logits = logits + routed["logit_bias"]
    scores = routing.scores(logits, config.router)
    mix, chosen = _routed(config, reads, routed, logits, scores)
    chosen = jnp.where(real.reshape(-1, 1), chosen, C)
    picked = jnp.sum(chosen.reshape(B, T, k)[..., None] == jnp.arange(C), axis=2).astype(jnp.float32)
    if config.load_bias:
        mix = routing.with_load(mix, routed["bias"], picked.sum(axis=(0, 1)))
    aux = _losses(config, logits, scores, picked, real, weights, act)
    idle = jnp.sum(jnp.where((chosen >= E) & (chosen < C), mix, 0), axis=-1) if config.idle else None
    chosen = jnp.minimum(chosen, E)
    shared_by = tuple(axis for axis in act.axes("seq") if axis not in act.axes("whole_seq"))
    rows = x.reshape(-1, D)
    if config.weighs_inputs:
        rows, mix = rows * mix.astype(x.dtype), jnp.ones_like(mix)
    tokens = (rows, mix, chosen)
    if shared_by:
        tokens = tuple(jax.lax.all_gather(a, shared_by, tiled=True) for a in tokens)

    def multiply(rows, name, sizes):
        if name in few or name in anew:
            held = Grouped(*(experts[part] for part in parts_of(name, experts)))
            if name in few:
                return expert_product(rows, held, sizes, few[name], execution.few_bits)
            return anew_experts(anew[name], execution.grouped_matmul, rows, held, sizes)
        return grouped_matmul.grouped_matmul(rows, experts[name], sizes, implementation=execution.grouped_matmul)

    def run(rows, sizes):
        biased = functools.partial(_biased, experts, sizes) if config.bias else lambda a, name: a
        up = biased(multiply(rows, "up", sizes), "up_bias")
        if config.gated:
            gate = biased(multiply(rows, "gate", sizes), "gate_bias")
            hidden = gated(gate, up, config.activation, config.limit)
        else:
            hidden = activate(up, config.activation)
        out = multiply(hidden, "down", sizes)
        if not (config.bias and execution.rules.use.axes("expert_mlp")):
            return biased(out, "down_bias")
        # Each device has a part of every sum over the hidden layer; one of them adds the bias.
        return jnp.where(jax.lax.axis_index("tensor") == 0, biased(out, "down_bias"), out)

    out, dropped = run_experts(dispatch, *tokens, run)
    if shared_by:
        out = jax.lax.psum_scatter(out, shared_by, tiled=True)
        dropped = dropped / jax.lax.axis_size(shared_by)  # each of them counted the same pairs
    parts = () if shared_by else execution.rules.use.axes("expert_mlp")  # where the sequence is whole, as in decoding
    parts += ("expert",) if dispatch.exchange == "everywhere" else ()
    if parts:
        out = jax.lax.psum(out, parts)
    everywhere = act.axes("batch") + act.axes("seq")
    aux["dropped"] = dropped
    out = out.reshape(B, T, D)
    out = out if idle is None else out + x * idle.reshape(B, T, 1).astype(x.dtype)
    return out, jax.lax.psum(aux, everywhere) if everywhere else aux


def _routed(config: MoeConfig, reads, routed, logits, scores) -> tuple[jax.Array, jax.Array]:
    """What each token's experts weigh, and which they are: float32 and int32 [B * T, k]. logits, scores [B, T, C]."""
    k, E, C = config.top_k, config.num_experts, config.choices
    if config.hashed:
        chosen = reads["chosen"].reshape(-1, k).astype(jnp.int32)
        mix = routing.weights_of(scores.reshape(-1, C), chosen, config.router)
    elif config.router.scoring == "sparsemixer":
        mix, chosen = routing.sparsely_mixed(logits.reshape(-1, E), k, config.router.jitter)
    else:
        both = scores.reshape(-1, C), logits.reshape(-1, C)
        mix, chosen = routing.route(both[0], routed.get("bias"), k, config.router, both[1])
    if config.apart:
        mix = mix * (jax.nn.one_hot(chosen, E, dtype=mix.dtype) @ routed["expert_scale"].astype(mix.dtype))
    return mix, chosen


def _biased(experts, sizes, a, name: str):
    """a [rows, F] plus its expert's bias; rows are sorted by expert, of which each has sizes [E]."""
    expert = jnp.sum(jnp.arange(a.shape[0])[:, None] >= jnp.cumsum(sizes), axis=-1)
    own = jax.nn.one_hot(expert, sizes.shape[0], dtype=a.dtype)  # a gather's gradient would be a scatter
    return a + own @ experts[name].astype(a.dtype)


def _losses(config: MoeConfig, logits, scores, picked, real, weights, act) -> dict[str, jax.Array]:
    """This device's share of the losses and counts. A row's balance weighs as much as its tokens do in the loss."""
    along = act.axes("seq")

    def over_row(a):
        return jax.lax.psum(a, along) if along else a

    sums_to_1 = config.router.scoring in ("softmax", "sparsemixer")
    probabilities = scores if sums_to_1 else scores / (scores.sum(-1, keepdims=True) + 1e-20)
    balance = routing.row_balance(jnp.where(real[..., None], probabilities, 0), picked, config.top_k, over_row)
    partition = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return {
        "balance_loss": config.balance_loss * jnp.sum(balance * weights.sum(axis=1)),
        "router_z_loss": config.router_z_loss * jnp.sum(partition * weights),
        "expert_load": picked.sum(axis=(0, 1)),
    }
