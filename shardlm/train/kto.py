"""Training on answers that are wanted or not, without pairs: Kahneman-Tversky optimisation (KTO,
https://arxiv.org/abs/2402.01306) of a checkpoint against the checkpoint as it was. In a row segments 2k + 1 and 2k + 2
are an answer and another prompt's answer behind the same prompt (data/labelled.py)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.data.packing import DESIRABLE, MAX_PAIRS
from shardlm.ops.preference import pair_sums, prospect_loss
from shardlm.state import ModelDef
from shardlm.train.preference import Preference, begins, token_nll_of
from shardlm.train.step import Batch, in_order, with_auxiliary


@dataclasses.dataclass(frozen=True)
class Prospect(Preference):
    """The objective: the mean over answers of `prospect_loss` of beta times how much more likely the model makes each
    than the reference does, beside beta times the divergence between both: how much more likely the model makes, on
    average over a microbatch and at least 0, the answers that belong to other prompts. No gradient goes there.

    What `reported` names beside the loss: kl, that divergence; reward_accuracy, the share of answers that are on their
    side of it, wanted ones above and others below; reward_margin, how far they are; desirable, the share that is wanted
    """

    counted = "answers"
    reported = ("loss", "kl", "reward_margin", "reward_accuracy", "desirable")
    columns = (DESIRABLE,)

    def sums(self, model: ModelDef, params: Any, batch: Batch, weights: dict[str, jax.Array]):
        """Besides the auxiliary ones, the parts are sums over answers of the metrics, and of rewards by label."""
        batch, weights = in_order((batch, weights), model.execution)
        nll, aux = token_nll_of(model, params, batch, weights["tokens"])
        sums = functools.partial(pair_sums, segment_ids=batch["segment_ids"], most=MAX_PAIRS)
        own, mismatched = sums((self._before(model, batch, weights) - nll) * batch["loss_mask"])
        first = begins(batch)
        (weight, _), (there, _), (wanted, _) = map(sums, (weights["pairs"], first, first * batch[DESIRABLE]))
        kl = jnp.maximum(jnp.sum(there * mismatched) / jnp.maximum(jnp.sum(there), 1), 0)
        reward, side = self.config.beta * own, 2 * wanted - 1
        margin = side * (reward - self.config.beta * jax.lax.stop_gradient(kl))
        scale = jnp.where(wanted > 0, self.config.desirable_weight, self.config.undesirable_weight)
        of_answers = {
            "loss": scale * prospect_loss(margin),
            "kl": kl,
            "reward_margin": margin,
            "reward_accuracy": margin > 0,
            "desirable": wanted,
            "chosen_reward": wanted * reward,
            "rejected_reward": (1 - wanted) * reward,
        }
        parts = {name: jnp.sum(weight * values) for name, values in of_answers.items()}
        return with_auxiliary(parts["loss"], aux), jax.lax.stop_gradient(parts) | aux

    def metrics(self, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Means over answers of what is reported; over those that are wanted chosen_reward, and over the others
        rejected_reward; and `loads`."""
        shares = {"chosen_reward": parts["desirable"], "rejected_reward": 1 - parts["desirable"]}
        found = {name: parts[name] / jnp.maximum(share, 1e-9) for name, share in shares.items()}
        return super().metrics(parts) | found
