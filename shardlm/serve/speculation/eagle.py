"""Drafts from a head that reads the model's streams (EAGLE-3, https://arxiv.org/abs/2503.01840; layers/eagle.py), with
weights and pages of its own.

At position p it takes what `fc` makes of the model's streams there and token p + 1, and predicts the token after that
one; further drafts are of its own stream, before its last norm or after it, and the draft before. That is what one
module for multi-token prediction does (multi_token.py), with what is kept of a slot, of shared pages and of prefixes
from the cache."""

import dataclasses
from typing import ClassVar

import jax

from shardlm.layers.paged import Paged
from shardlm.models.transformer import Transformer
from shardlm.serve.programs import WHOLE
from shardlm.serve.speculation.multi_token import MultiTokenProposer


@dataclasses.dataclass(frozen=True)
class EagleProposer(MultiTokenProposer):
    """Its parameters are the head's, `model`. shared: names of those that are the model's own."""

    modules: ClassVar[int] = 1
    shared: tuple[str, ...] = ()

    def taken(self, lm: Transformer, hidden: jax.Array) -> jax.Array:
        return jax.reshard(lm.eagle(hidden, self.model.execution), WHOLE)

    def logits(self, lm: Transformer, made: jax.Array, module: int) -> jax.Array:
        made = lm.finish(made) if lm.eagle.config.goes_on == "stream" else made
        logits = jax.reshard(lm.logits(made)[:, 0], WHOLE)
        return lm.eagle.of_all(logits, self.model.execution)

    def run(self, lm: Transformer, module: int, pages, x, tokens, positions, ctx: Paged):
        ctx = dataclasses.replace(ctx, inputs=lm.embed(tokens, positions)[None])
        x, pages, _ = lm.run(x, positions, ctx, pages)
        return lm.finish(x) if lm.eagle.config.goes_on == "normed" else x, pages
