"""Optimizers and learning-rate schedules by name, over optax. Gradient clipping, EMA and the skipping of bad steps
belong to the training step (train/step.py)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from shardlm import moments, muon
from shardlm.errors import ShardlmError
from shardlm.moments import Moments
from shardlm.rules import Table

Optimizer = Literal["adamw", "lion", "adafactor", "muon", "sgd"]
Schedule = Literal["cosine", "linear", "wsd", "constant"]
ELEMENTWISE = ("adamw", "lion", "sgd")  # that treat every number alone
HEADS = ("heads", "kv_heads", "kv_heads_whole")  # names of a dimension that counts heads
ENCODER = "encoder"  # among trained parameters: those of an encoder of images (train/learned_encoder.py)


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Optimizer, schedule and what surrounds them.

    name            adamw (https://arxiv.org/abs/1711.05101), lion (https://arxiv.org/abs/2302.06675), adafactor
                    (https://arxiv.org/abs/1804.04235), muon for the layers' matrices with adamw for embedding, head
                    and norms (https://arxiv.org/abs/2502.16982), sgd with momentum b1
    learning_rate   its peak, reached after warmup_steps
    schedule        after warm-up: cosine or linear down to final_fraction of the peak at the last step, wsd (constant,
                    then linear over the last fifth, https://arxiv.org/abs/2404.06395), or constant
    weight_decay    on matrices, not on norms or biases
    clip_norm       largest global gradient norm; 0 does not clip
    ema_decay       of an average of the weights kept beside them; 0 keeps none
    load_bias_rate  step of the biases that even the load of experts (ops/routing.py, with_load)
    encoder_rate    factor on the learning rate of an encoder of images (train.encoder)
    moments         what the optimizer's state is held in: float32, bfloat16, or int8 with a scale a block (moments.py);
                    vectors and small weights stay float32
    """

    name: Optimizer = "adamw"
    learning_rate: float = 3e-4
    schedule: Schedule = "cosine"
    warmup_steps: int = 100
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    ema_decay: float = 0.0
    load_bias_rate: float = 1e-3
    encoder_rate: float = 1.0
    moments: Moments = "float32"

    def __post_init__(self):
        if not 0 <= self.ema_decay < 1:
            raise ShardlmError(f"ema_decay={self.ema_decay}: a decay is at least 0 (no average) and below 1")
        if self.learning_rate <= 0:
            raise ShardlmError(f"learning_rate={self.learning_rate}: a learning rate is positive")
        if self.encoder_rate <= 0:
            raise ShardlmError(
                f"encoder_rate={self.encoder_rate}: a factor is positive; with train.encoder=frozen no encoder is "
                "trained"
            )
        if self.moments not in get_args(Moments):
            raise ShardlmError(f"optim.moments={self.moments}: choose from {', '.join(get_args(Moments))}")
        if self.moments != "float32" and (self.name == "adafactor" or (self.name == "sgd" and not self.b1)):
            keeps = "sums of rows and columns" if self.name == "adafactor" else "nothing with optim.b1=0"
            raise ShardlmError(
                f"optim.moments={self.moments} with optim.name={self.name}, which keeps {keeps}: leave optim.moments "
                "at float32, or choose adamw, lion or muon"
            )


def make_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate as a function of the step, for a run of `steps`. Raises ShardlmError when warm-up doesn't fit."""
    warmup, peak, last = config.warmup_steps, config.learning_rate, config.learning_rate * config.final_fraction
    if warmup >= steps and config.schedule != "constant":
        raise ShardlmError(f"optim.warmup_steps={warmup} leaves nothing of train.steps={steps}; choose fewer")
    rest = max(1, steps - warmup)
    decay = max(1, math.ceil(0.2 * steps))
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, last, rest)
    elif config.schedule == "wsd":
        stable = max(0, rest - decay)
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, last, decay)], [stable]
        )
    elif config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        raise ShardlmError(f"unknown schedule {config.schedule!r}; choose from {', '.join(get_args(Schedule))}")
    # The first step already learns: warm-up counts from 1/warmup, not from 0.
    return optax.join_schedules(
        [optax.linear_schedule(peak / max(1, warmup), peak, max(1, warmup - 1)), after], [warmup]
    )


def make_optimizer(config: OptimConfig, steps: int, names: Any) -> optax.GradientTransformation:
    """The gradient transformation of `config`. `names` is the parameter tree with (stack_names, names) at each leaf
    (state.py); it says which parameters decay and which are matrices. Raises ShardlmError for an unknown name."""
    tx = _optimizer_of_weights(config, steps, names)
    if config.moments != "float32":
        tx = moments.held(tx, _kinds(config.moments, names), names)
    tx = _with_load_biases(tx, config.load_bias_rate)
    return _with_encoder_rate(tx, config.encoder_rate) if ENCODER in names and config.encoder_rate != 1 else tx


def _kinds(kind: Moments, names: Any) -> Any:
    """What the moments of each weight are to be in. How an encoder's rest split is up to the mesh
    (train/learned_encoder.py), where a block could be on two devices: in place of 8 bits they have 16."""

    def one(path, leaf):
        of_encoder = getattr(path[0], "key", None) == ENCODER
        return moments_of(kind, leaf[1], of_encoder)

    return jax.tree_util.tree_map_with_path(one, names, is_leaf=_is_names)


def moments_of(kind: Moments, names: tuple[str, ...], of_encoder: bool = False) -> Moments:
    """What the moments of a weight with these dimensions are to be in, before its size is looked at."""
    if _is_vector(names):
        return "float32"
    return "bfloat16" if of_encoder and kind == "int8" else kind


def check_moments(kind: Moments, names: Any, shapes: Any, table: Table) -> None:
    """Raises ShardlmError where a mesh would put one block of moments on two devices."""
    if kind != "int8":
        return

    def one(path, leaf, shape):
        stack, own = leaf
        if moments_of(kind, own) == "int8":
            ways = [table.mesh.size(*table.axes(name)) for name in own]
            where = ".".join(str(getattr(part, "key", part)) for part in path)
            moments.check_split(where, own, shape.shape[len(stack) :], ways)

    jax.tree_util.tree_map_with_path(one, names, shapes, is_leaf=_is_names)


def weight_gradients(grads: Any) -> list[jax.Array]:
    """The gradients of weights: all but those of the biases that even the load of experts, which are loads."""
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return [leaf for path, leaf in leaves if not _is_load_bias(path)]


def _is_load_bias(path) -> bool:
    return getattr(path[-1], "key", None) == "router_bias"


def _is_untrained(path) -> bool:
    """Whether a weight takes no part in the loss (layers/indexer.py; tables of experts, layers/moe.py)."""
    return any(getattr(part, "key", None) in ("indexer", "experts_of_token") for part in path)


def _with_load_biases(tx: optax.GradientTransformation, rate: float) -> optax.GradientTransformation:
    """`tx` for weights, and for the biases a step against the sign of their load (ops/routing.py, with_load). What
    takes no part in the loss stays as it is: it does not decay either."""

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)

        def pick(path, update, load):
            if _is_untrained(path):
                return jnp.zeros_like(update)
            return -rate * jnp.sign(load) if _is_load_bias(path) else update

        return jax.tree_util.tree_map_with_path(pick, updates, grads), state

    return optax.GradientTransformation(tx.init, update)


def _with_encoder_rate(tx: optax.GradientTransformation, factor: float) -> optax.GradientTransformation:
    """`tx`, whose updates of the encoder are so many times as large: the learning rate is a factor of all of each."""

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return {**updates, ENCODER: jax.tree.map(lambda u: factor * u, updates[ENCODER])}, state

    return optax.GradientTransformation(tx.init, update)


def _optimizer_of_weights(config: OptimConfig, steps: int, names: Any) -> optax.GradientTransformation:
    rate = make_schedule(config, steps)
    matrices = jax.tree.map(_is_matrix, names, is_leaf=_is_names)
    b1, b2, decay = config.b1, config.b2, config.weight_decay
    if config.name == "adamw":
        return optax.adamw(rate, b1, b2, config.eps, weight_decay=decay, mask=matrices)
    if config.name == "lion":
        return optax.lion(rate, b1, b2, weight_decay=decay, mask=matrices)
    if config.name == "sgd":
        momentum = optax.trace(b1) if b1 else optax.identity()
        decayed = optax.add_decayed_weights(decay, matrices)
        return optax.chain(momentum, decayed, optax.scale_by_learning_rate(rate))
    if config.name == "adafactor":
        # optax multiplies weight_decay_rate into the update as it is; times the rate makes it decay like adamw's.
        tx = optax.adafactor(rate, weight_decay_rate=decay * config.learning_rate, weight_decay_mask=matrices)
        return _any_layout(tx.init, lambda specs: tx)
    if config.name == "muon":
        make = functools.partial(_muon, config, rate, names, matrices)
        return _any_layout(lambda params: make(_specs(params)).init(params), make)
    raise ShardlmError(f"unknown optimizer {config.name!r}; choose from {', '.join(get_args(Optimizer))}")


def _muon(config: OptimConfig, rate, names, matrices, specs) -> optax.GradientTransformation:
    """With the state of optax.contrib.muon: of matrices MuonState, of the rest adamw's. `specs` as muon.py has them."""
    dimensions = jax.tree.map(_muon_dimensions, names, is_leaf=_is_names)
    masked = jax.tree.map(lambda d: d or optax.MaskedNode(), dimensions, is_leaf=_is_dimensions)
    labels = jax.tree.map(lambda d: "muon" if d else "adam", dimensions, is_leaf=_is_dimensions)
    of_matrices = optax.chain(
        # Updates as large as adamw's, so that its learning rate serves both (section 2.2 there).
        muon.orthogonalised(masked, specs, scale=0.2),
        optax.identity(),
        optax.add_decayed_weights(config.weight_decay, matrices),
        optax.scale_by_learning_rate(rate),
    )
    others = optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps, nesterov=True),
        _decayed(config.weight_decay, matrices),
        optax.scale_by_learning_rate(rate),
    )
    return optax.partition({"muon": of_matrices, "adam": others}, labels)


def _decayed(decay: float, matrices: Any) -> optax.GradientTransformation:
    """optax.add_decayed_weights for some of the parameters that `matrices` is of, of which it decays those that are
    True; its state is that of all of them, so that of adamw's is contrib.muon's."""

    def update(updates, state, params):
        one = lambda u, p, matrix: u + decay * p if matrix else u  # noqa: E731
        return jax.tree.map(one, updates, params, _like(updates, matrices)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _like(some: Any, whole: Any) -> Any:
    """The leaves of `whole` at which `some` is not masked."""
    masked = lambda leaf: isinstance(leaf, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(lambda a, b: a if masked(a) else b, some, whole, is_leaf=masked)


def _is_dimensions(leaf) -> bool:
    return leaf is None or isinstance(leaf, contrib.MuonDimensionNumbers)


def _specs(params: Any) -> Any:
    return jax.tree.map(lambda a: jax.typeof(a).sharding.spec, params)


def _any_layout(
    init: Callable[[Any], Any], make: Callable[[Any], optax.GradientTransformation]
) -> optax.GradientTransformation:
    """What `make` gives for gradients that are split so, with XLA choosing inner shardings: its matmuls and reductions
    mix dimensions that are split, which explicit types refuse. What goes in and what comes out keep theirs."""

    def update(grads, state, params):
        mesh = jax.sharding.get_abstract_mesh()
        axes = tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)  # in a replica: all but data
        out = _specs((grads, state))
        return jax.sharding.auto_axes(make(out[0]).update, axes=axes, out_sharding=out)(grads, state, params)

    return optax.GradientTransformation(init, update)


def _is_names(leaf) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and all(isinstance(part, tuple) for part in leaf)


def _is_matrix(leaf) -> bool:
    return not _is_vector(leaf[1])


def _is_vector(names: tuple[str, ...]) -> bool:
    """Whether a weight of these dimensions is a vector, or one for each expert, in as many dimensions as what makes it
    has: a bias of queries, keys or values, a norm of heads. Filters of each channel are none, as elsewhere."""
    own = names[1:] if names[:1] == ("experts",) else names
    return len(own) < 2 or (len(own) == 2 and own[0] in HEADS and own[1] in ("head_dim", "norm"))


def muon_rows(names: tuple[str, ...]) -> int:
    """How many of a matrix's dimensions are its rows."""
    return 1 if names[0] in ("embed", "expert_embed", "rank", "latent_whole") else len(names) - 1


def is_muons(names: tuple[str, ...]) -> bool:
    """Whether Muon's update is for weights of these dimensions: matrices, but not those that look tokens up or name
    them, nor filters of each channel by itself (layers/delta_net.py's taps)."""
    return not _is_vector(names) and "vocab" not in names and names[-1] != "norm"


def _muon_dimensions(leaf):
    """Which dimensions of a stacked weight are a matrix's rows (inputs) and columns (outputs); None: use adamw."""
    stack, names = leaf
    if not is_muons(names):
        return None
    first, last = len(stack) + (names[0] == "experts"), len(stack) + len(names) - 1  # each expert has its own matrices
    dims = range(first, last + 1)
    rows = tuple(dims[: muon_rows(names[first - len(stack) :])])
    return contrib.MuonDimensionNumbers(rows, tuple(d for d in dims if d not in rows))
