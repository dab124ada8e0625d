"""Random models of any shape on any mesh, and what they say: one row at a time, by the model's forward pass over all
tokens so far and a sampler in numpy. No cache, no batch; keys and values are rounded as a cache would do it."""

import copy
import dataclasses
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from engines import TOKENIZER
from flax.traverse_util import flatten_dict, unflatten_dict
from small import mesh_of

from shardlm.layers.lora import LoraConfig
from shardlm.layers.packed import Packed
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.opened import Opened
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef, at_rest, joined

LONGEST = 64
STEP = {"int4": 0.2 / 7, "fp8": 0.2 / 448}


def opened_of(shape: TransformerConfig, spec: MeshSpec, seed: int = 0, lora: int = 0, weights: str = "dtype") -> Opened:
    """A model with random weights, the same ones on every mesh, as a checkpoint would be opened for serving."""
    mesh = mesh_of(spec)
    rules = serving_rules(shape, spec, weights)
    adapters = LoraConfig(lora, base=weights) if lora else LoraConfig()
    with jax.set_mesh(mesh):
        model = ModelDef.make(shape, Execution(rules, lora=adapters, weights=weights))
        shapes = model.held_at_rest(mesh)
        if lora:
            shapes = joined(shapes, jax.tree.map(lambda s: at_rest(s, mesh), model.shapes))
    params = {path: _random(path, s, seed, weights) for path, s in flatten_dict(shapes).items()}
    return Opened(model, unflatten_dict(params), mesh, None, pathlib.Path())


def _random(path: tuple, shape: jax.ShapeDtypeStruct, seed: int, weights: str) -> jax.Array:
    rng = np.random.default_rng(zlib.crc32(repr((path, seed)).encode()))
    if shape.dtype == jnp.int8:
        values = rng.integers(-127, 128, shape.shape)
    elif shape.dtype == jnp.float8_e4m3fn:
        values = rng.uniform(-448, 448, shape.shape)
    elif shape.dtype == jnp.bfloat16:  # scales of few bits
        values = rng.uniform(0.5, 1, shape.shape) * STEP[weights]
    elif "norm" in str(path):
        values = rng.uniform(0.5, 1.5, shape.shape)
    else:
        values = rng.normal(0, 0.2, shape.shape)
    return jax.device_put(values.astype(shape.dtype), shape.sharding)


@dataclasses.dataclass(frozen=True)
class Said:
    """One reply, and of each of its tokens the raw log-probabilities [V] of all that could have stood there."""

    tokens: list[int]
    logprobs: list[np.ndarray]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded(Packed):
    """Keys and values are what a cache of `kv_cache` gives back."""

    kv_cache: str = dataclasses.field(default="auto", metadata={"static": True})

    def attend(self, q, k, v, *where, **options):
        return super().attend(q, rounded(k, self.kv_cache), rounded(v, self.kv_cache), *where, **options)


def rounded(a: jax.Array, how: str) -> jax.Array:
    """a [..., H], a head at a time. The bits are looked at between, or XLA takes both conversions away."""
    if how == "auto":
        return a
    if how == "int8":
        step = jnp.max(jnp.abs(a), axis=-1, keepdims=True) / 127
        return jnp.round(a / step) * step
    bits = jax.lax.bitcast_convert_type(jnp.clip(a, -448, 448).astype(jnp.float8_e4m3fn), jnp.uint8)
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(a.dtype)


class Oracle:
    """One model on one device."""

    def __init__(self, opened: Opened, kv_cache: str = "auto"):
        self.opened, self.kv_cache = opened, kv_cache
        self._run = jax.jit(self._forward)
        self._known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def of(self, params) -> "Oracle":
        """The same with other weights."""
        other = copy.copy(self)
        other.opened, other._known = dataclasses.replace(self.opened, params=params), {}
        return other

    def _forward(self, params, tokens, length):
        model = self.opened.model
        lm = model.model(params)
        index = jnp.arange(LONGEST, dtype=jnp.int32)[None]
        segments = (index < length).astype(jnp.int32)
        hidden, _, _ = lm(tokens, index, Rounded(segments, model.execution.rules, kv_cache=self.kv_cache))
        return lm.logits(hidden)[0], hidden[0]

    def forward(self, tokens) -> tuple[np.ndarray, np.ndarray]:
        """(logits [T, V], hidden [T, D])."""
        tokens = tuple(tokens)
        if tokens not in self._known:
            row = np.zeros((1, LONGEST), np.int32)
            row[0, : len(tokens)] = tokens
            with jax.set_mesh(self.opened.mesh):
                logits, hidden = self._run(self.opened.params, row, len(tokens))
            own = slice(len(tokens))
            self._known[tokens] = np.asarray(logits, np.float64)[own], np.asarray(hidden)[own]
        return self._known[tokens]

    def logprobs(self, tokens) -> np.ndarray:
        """[T, V], of what follows each token."""
        logits = self.forward(tokens)[0]
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def embedding(self, tokens) -> np.ndarray:
        """[D], of length 1."""
        last = self.forward(tokens)[1][-1]
        return last / np.linalg.norm(last)

    def reply(self, prompt, params: SamplingParams, index: int = 0) -> Said:
        """The `index`-th reply; of structured outputs it knows choices, also after one text."""
        said, form = Said([], []), params.structured_outputs
        choices, after = (form.choice, "".join(form.after)) if form else ((), "")
        while len(said.tokens) < params.max_tokens and _held(said.tokens, after) not in choices:
            before = [*prompt, *said.tokens]
            scores = _penalised(self.forward(before)[0][-1], prompt, said.tokens, params)
            if choices:
                scores = np.where(_allowed(said.tokens, choices, after, len(scores)), scores, -np.inf)
            said.tokens.append(_chosen(scores, params, len(prompt) + len(said.tokens), index))
            said.logprobs.append(self.logprobs(before)[-1])
        return said


def _penalised(scores: np.ndarray, prompt, reply, params: SamplingParams) -> np.ndarray:
    scores = scores.copy()
    for token in {*prompt, *reply}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(reply):
        scores[token] -= params.frequency_penalty * reply.count(token) + params.presence_penalty
    return scores


def _held(tokens: list[int], after: str) -> str | None:
    """What stands after the text; None where that has not come."""
    text = TOKENIZER.decode(tokens)
    return text.partition(after)[2] if after and after in text else None if after else text


def _allowed(tokens: list[int], choices, after: str, vocab: int) -> np.ndarray:
    """Tokens with which what is held, of ASCII, still begins one of the choices; before, all that do not go beyond."""
    text = _held(tokens, after)
    if text is None:
        free = TOKENIZER.decode(tokens)
        new = [TOKENIZER.decode([t], skip_special=False) if t < TOKENIZER.vocab_size else "" for t in range(vocab)]
        return np.array([not _held_text(free + one, after) for one in new])
    new = [TOKENIZER.decode([t]) if t < TOKENIZER.vocab_size else "" for t in range(vocab)]
    return np.array([bool(one) and any(choice.startswith(text + one) for choice in choices) for one in new])


def _held_text(text: str, after: str) -> str:
    return text.partition(after)[2]


def _chosen(scores: np.ndarray, params: SamplingParams, position: int, index: int) -> int:
    if params.temperature == 0:
        return int(scores.argmax())
    scaled = scores / params.temperature
    if params.top_k:
        scaled = np.where(scaled >= np.sort(scaled)[-params.top_k], scaled, -np.inf)
    key = jax.random.fold_in(jax.random.key(params.seed + index), position)
    return int((scaled + np.asarray(jax.random.gumbel(key, scaled.shape))).argmax())
