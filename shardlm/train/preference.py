"""Training on preferences: direct preference optimisation (DPO, https://arxiv.org/abs/2305.18290) of a checkpoint, by
all its weights or by adapters, against the checkpoint as it was, and losses that do without that. Rows are
data/packing.py's pairs."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp

from shardlm.data.packing import MAX_PAIRS
from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.packed import Packed
from shardlm.layers.seen import BEFORE, VECTORS
from shardlm.models.pretrained import Pretrained
from shardlm.ops.cross_entropy import token_nll
from shardlm.ops.preference import hinge_loss, identity_loss, odds_loss, pair_sums, preference_loss
from shardlm.state import ModelDef
from shardlm.train.config import PreferenceConfig, RunConfig
from shardlm.train.replicas import apart
from shardlm.train.step import Batch, NextToken, head_layout, in_order, loads, with_auxiliary


@dataclasses.dataclass(frozen=True)
class Preference:
    """The objective: the mean over pairs of a loss of both answers' rewards, beta times how much more likely the model
    makes each than the reference does, or, without a reference, beta times its mean log-probability a token.

    reference  the model as it was, whose weights are `TrainState.frozen`: without adapters the weights that training
               began from, with adapters those that they stand on; beside an encoder of images that is trained batches
               have the vectors of the one that was. None where the loss asks for none
    """

    config: PreferenceConfig
    reference: ModelDef | None
    counted = "pairs"
    reported = ("loss", "reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward")
    columns = ()

    @classmethod
    def make(cls, config: PreferenceConfig, model: ModelDef) -> Self:
        """Of a model that is trained; under the run's mesh."""
        plain = dataclasses.replace(model.execution, lora=LoraConfig())
        return cls(config, ModelDef.make(model.config, plain) if config.compares else None)

    def count(self, batch: Batch) -> jax.Array:
        return jnp.sum(begins(batch))

    def used(self, batch: Batch, microbatches: int) -> int:
        return microbatches

    def weights(self, batch: Batch, scale: jax.Array) -> dict[str, jax.Array]:
        """A pair's weight stands at its first token. Auxiliary losses weigh tokens as in `NextToken`; ORPO's own loss
        of next tokens is a mean over all of the chosen documents, prompts too."""
        first = begins(batch)
        pairs = first * (scale / jnp.maximum(jnp.sum(first), 1))
        found = {"pairs": pairs, "tokens": NextToken().weights(batch, scale)}
        if self.config.loss != "orpo":
            return found
        chosen = (batch["segment_ids"] % 2).astype(jnp.float32)
        return found | {"chosen": chosen * (scale / jnp.maximum(jnp.sum(chosen), 1))}

    def sums(self, model: ModelDef, params: Any, batch: Batch, weights: dict[str, jax.Array]):
        """Besides the auxiliary ones, the parts are sums over pairs of the metrics that `metrics` names."""
        batch, weights = in_order((batch, weights), model.execution)
        nll, aux = token_nll_of(model, params, batch, weights["tokens"])
        sums = functools.partial(pair_sums, segment_ids=batch["segment_ids"], most=MAX_PAIRS)
        weight, _ = sums(weights["pairs"])
        losses, chosen, rejected = self._of_pairs(model, batch, weights, nll, sums)
        of_pairs = {
            "loss": losses,
            "reward_margin": chosen - rejected,
            "reward_accuracy": chosen > rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        parts = {name: jnp.sum(weight * values) for name, values in of_pairs.items()}
        if self.config.loss == "orpo":
            parts["loss"] += jnp.sum(weights["chosen"] * nll)
        return with_auxiliary(parts["loss"], aux), jax.lax.stop_gradient(parts) | aux

    def _of_pairs(self, model: ModelDef, batch: Batch, weights: dict[str, jax.Array], nll: jax.Array, sums):
        """(losses, rewards of the chosen answers, of the rejected ones), of each pair [B, P]."""
        config, scored = self.config, batch["loss_mask"]
        gain = (self._before(model, batch, weights) - nll) * scored if self.reference else -nll * scored
        of_both = sums(gain)
        if config.loss != "sigmoid" or config.sft_weight:
            counts = sums(scored)
        if config.loss in ("ipo", "simpo", "orpo"):  # of what is no pair anything that is finite
            means = [jnp.where(n > 0, gain / jnp.maximum(n, 1), -1.0) for gain, n in zip(of_both, counts, strict=True)]
        chosen, rejected = (config.beta * gain for gain in (of_both if self.reference else means))
        match config.loss:
            case "sigmoid":
                losses = preference_loss(chosen - rejected, config.label_smoothing)
            case "hinge":
                losses = hinge_loss(chosen - rejected)
            case "ipo":
                losses = identity_loss(means[0] - means[1], config.beta)
            case "simpo":
                losses = preference_loss(chosen - rejected - config.gamma, config.label_smoothing)
            case "orpo":
                losses = config.beta * odds_loss(*means)
        if config.sft_weight:
            surprise, _ = sums(nll * scored)
            losses = losses + config.sft_weight * surprise / jnp.maximum(counts[0], 1)
        return losses, chosen, rejected

    def _before(self, model: ModelDef, batch: Batch, weights: dict[str, jax.Array]) -> jax.Array:
        """The reference's negative log-likelihood of each token."""
        was = batch | {VECTORS: batch[BEFORE]} if BEFORE in batch else batch
        return token_nll_of(self.reference, model.frozen, was, weights["tokens"])[0]

    def metrics(self, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Means over pairs: loss, reward_margin (the chosen answer's reward less the rejected one's), reward_accuracy
        (the share of pairs in which it is positive), chosen_reward and rejected_reward; and `loads`."""
        return {name: parts[name] for name in self.reported} | loads(parts)


def token_nll_of(model: ModelDef, params: Any, batch: Batch, weights: jax.Array):
    """(float32 [B, T] of the targets, the layers' auxiliary values), of a batch in the order of its rows."""
    lm = model.model(params)
    ctx = Packed.of_rows(batch, weights, model.execution)
    hidden, _, aux = lm(batch["tokens"], batch["positions"], ctx)
    own = {"layout": head_layout(lm), "bias": lm.bias_of_head()}
    return token_nll(hidden, lm.head_param()[...], batch["targets"], **own), aux


def begins(batch: Batch) -> jax.Array:
    """float32 [B, T], 1 at each pair's first token."""
    return ((batch["positions"] == 0) & (batch["segment_ids"] % 2 == 1)).astype(jnp.float32)


def check_preference(config: RunConfig) -> None:
    """Refuses what does not go with config.preference, before anything compiles."""
    beta, packing = config.preference.beta, config.data.packing
    wants = "labelled" if config.preference.loss == "kto" else "pairs"
    if packing in ("pairs", "labelled") and not beta:
        raise ShardlmError(
            f"data.packing={packing} with preference.beta=0: such answers are trained on by their preference; set "
            "preference.beta, to 0.1 for instance, or data.packing to cut or whole"
        )
    if not beta:
        return
    what = f"preference.beta={beta}"
    if packing != wants:
        raise ShardlmError(
            f"{what} and preference.loss={config.preference.loss} with data.packing={packing}: preferences are "
            f"{wants}; set it to {wants}"
        )
    compares = config.preference.compares
    if compares and not isinstance(config.model, Pretrained):
        raise ShardlmError(
            f"{what} with new weights: the reference is a checkpoint as it was; set model to Pretrained(FOLDER)"
        )
    if apart(config):
        raise ShardlmError(
            f"{what} with replicas that exchange in their own way (slow_link, local_sgd or train.shares): pairs are "
            "averaged over the whole batch every step; leave those as they are"
        )
    if config.mesh.pipeline != 1:
        raise ShardlmError(
            f"{what} with mesh.pipeline={config.mesh.pipeline}: stages train on next tokens; give the devices of "
            "pipeline to fsdp or tensor"
        )
    if compares and config.offload.params:
        raise ShardlmError(
            f"{what} with offload.params: the reference stays on the device as the weights would; set offload.params "
            "to False (offload.optimizer works), or train adapters by lora.rank"
        )
    if config.train.z_loss or config.train.baselines:
        raise ShardlmError(
            f"{what} with train.z_loss={config.train.z_loss} and train.baselines={config.train.baselines}: both are of "
            "next tokens; set train.z_loss to 0 and train.baselines to False"
        )
