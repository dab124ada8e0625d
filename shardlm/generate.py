"""Simple, correct generation with the model that trains: prefill, then one token at a time over a paged cache. For
samples and spot checks; the serving engine batches and schedules."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardlm.errors import ShardlmError
from shardlm.layers.context import MEMORIES, TEXTS, Pages
from shardlm.layers.page_layout import PageLayout, layout_of_rows, page_size_for, usual_page_size
from shardlm.layers.paged import Paged
from shardlm.ops.kv_format import held, order_of, pool_names, pool_shape
from shardlm.ops.sampling import sample
from shardlm.state import ModelDef, cache_entries, memory_entries, text_entries
from shardlm.tokenizer import Tokenizer

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep every token; one seed gives the same text every time."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ShardlmError(
                f"temperature={self.temperature} must be at least 0, top_k={self.top_k} at least 0 (0: all) and "
                f"top_p={self.top_p} above 0 and at most 1"
            )


def make_pages(model: ModelDef, layout: PageLayout, page_size: int = PAGE_SIZE) -> Pages:
    """An empty cache in what the execution says, split as the heads are; call inside jit."""
    execution = model.execution
    act, how = execution.rules.act, (execution.kv_cache, execution.dtype, execution.paged_attention)
    pools = {
        name: jnp.zeros(
            pool_shape(order, layout.layers * layout.num_pages, page_size, *shape),
            dtype,
            out_sharding=act.spec(*pool_names(order, kv_name)),
        )
        for name, (shape, kv_name, dtype) in held(cache_entries(model), *how).items()
        for order in [order_of(name, dtype, execution.paged_attention)]
    }
    count = layout.memories * layout.slots
    memories = {
        name: jnp.zeros((count, *shape), dtype, out_sharding=act.spec(*MEMORIES[name]))
        for name, (shape, dtype) in (memory_entries(model, layout.unsure) if count else {}).items()
    }
    texts = {
        name: jnp.zeros((layers * layout.slots, *shape), dtype, out_sharding=act.spec(*TEXTS[name]))
        for name, (layers, shape, dtype) in (text_entries(model, layout.unsure) if count else {}).items()
    }
    return pools | memories | texts


def generate(
    model: ModelDef,
    params,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Sequence[int] = (),
) -> Iterator[int]:
    """Yields the new tokens of one prompt until a stop id (not yielded) or `max_new_tokens`.

    `model` must run under `Rules.for_decoding()` and its mesh must be set. Raises ShardlmError for an empty prompt
    or a token outside the vocabulary.
    """
    vocab = model.config.vocab_size
    if not prompt:
        raise ShardlmError("the prompt has no tokens; give at least one")
    if bad := [t for t in prompt if not 0 <= t < vocab]:
        raise ShardlmError(
            f"token {bad[0]} of the prompt is outside the vocabulary of {vocab}; use the model's tokenizer"
        )
    layout, table, page_size = _one_text(model, len(prompt) + max_new_tokens)
    pages = jax.jit(partial(make_pages, model, layout, page_size))()
    step = jax.jit(partial(_next_token, model, layout, page_size, sampling), donate_argnums=1)
    tokens, start = _padded(prompt), 0
    for _ in range(max_new_tokens):
        token, pages = step(params, pages, table, tokens, np.int32(start), np.int32(start + len(prompt)))
        start, prompt = start + len(prompt), [int(token)]
        tokens = np.array([prompt], np.int32)
        if prompt[0] in stop_ids:
            return
        yield prompt[0]


def _one_text(model: ModelDef, length: int) -> tuple[PageLayout, np.ndarray, int]:
    """The pages of one text of so many tokens, all of which are kept: (layout, table [1, groups * W], page size)."""
    shape, own = model.config, len(set(model.config.sources))
    size = page_size_for(shape.rows, usual_page_size(jax.sharding.get_mesh().devices.flat[0].platform))
    width = -(-length // size)
    if shape.compressed:
        layout = layout_of_rows(shape.rows, 0, length, size, length)
    else:
        layout = PageLayout.whole(own, 0, shape.memories, slots=1).reading(shape.sources)
        layout = dataclasses.replace(layout, both=shape.both)
    groups = len(layout.windows)
    table = np.arange(1, groups * width + 1, dtype=np.int32)[None]  # page 0 is scrap
    return dataclasses.replace(layout, num_pages=groups * width + 1), table, size


def stream(
    model: ModelDef,
    params,
    mesh: Mesh,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
) -> Iterator[str]:
    """Yields the text that continues `prompt`, piece by piece, up to one of the stop ids at most."""
    pieces = tokenizer.stream()
    with jax.set_mesh(mesh):
        options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop_ids": stop_ids}
        for token in generate(model, params, prompt, **options):
            yield pieces.step(token)
    yield pieces.finish()


def _padded(prompt: Sequence[int]) -> np.ndarray:
    """The prompt as int32 [1, T], T a power of two, so that few lengths are ever compiled."""
    length = 1 << (len(prompt) - 1).bit_length()
    return np.array([[*prompt, *[0] * (length - len(prompt))]], np.int32)


def _next_token(
    model: ModelDef, layout: PageLayout, page_size: int, sampling: Sampling, params, pages, table, tokens, start, end
):
    """Runs tokens [1, T] at positions start, start + 1, ... of which those before `end` count; (next token, pages)."""
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    last = table.shape[1] // len(layout.windows) * page_size - 1
    slot = jnp.zeros(tokens.shape[0], jnp.int32)
    ctx = Paged.make(table, positions < end, layout, model.execution, slot=slot)
    lm = model.model(params)
    hidden, pages, _ = lm(tokens, jnp.minimum(positions, last), ctx, pages)
    final = jax.lax.dynamic_slice_in_dim(hidden, end - start - 1, 1, axis=1)
    logits = jax.reshard(lm.logits(final)[:, 0], jax.sharding.PartitionSpec())  # [1, V], whole on every device
    key = jax.random.fold_in(jax.random.key(sampling.seed), end)
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return sample(logits, key, **options)[0], pages
