"""Training on rewarded replies: group relative policy optimisation (GRPO, https://arxiv.org/abs/2402.03300) of a
checkpoint, by all its weights or by adapters. Replies, their rewards and the rows that they stand in are
shardlm/reinforce's."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.models.pretrained import Pretrained
from shardlm.ops.policy_loss import divergence, policy_loss
from shardlm.state import ModelDef
from shardlm.train.config import GrpoConfig, RunConfig
from shardlm.train.preference import token_nll_of
from shardlm.train.replicas import apart
from shardlm.train.step import Batch, NextToken, filled_microbatches, in_order, loads, with_auxiliary

ADVANTAGES, SAMPLED = "advantages", "sampled_logprobs"


@dataclasses.dataclass(frozen=True)
class Policy:
    """The objective: the mean of `policy_loss` over the tokens of replies, as config.loss takes it, with config.beta
    times the mean divergence from the reference. loss_mask is what each token weighs in that mean.

    replies    in a batch
    reference  the model as it was, whose weights are `TrainState.frozen`, where there is a beta
    """

    config: GrpoConfig
    replies: int
    reference: ModelDef | None
    counted = "tokens"
    reported = ("loss",)
    columns = (ADVANTAGES, SAMPLED)

    @classmethod
    def make(cls, config: GrpoConfig, replies: int, model: ModelDef) -> "Policy":
        """Of a model that is trained; under the run's mesh."""
        plain = dataclasses.replace(model.execution, lora=LoraConfig())
        return cls(config, replies, ModelDef.make(model.config, plain) if config.beta else None)

    def count(self, batch: Batch) -> jax.Array:
        return jnp.sum(batch["loss_mask"])

    def used(self, batch: Batch, microbatches: int) -> jax.Array:
        """Replies are packed into the first rows, so that the last microbatches may be empty."""
        return filled_microbatches(batch, microbatches)

    def weights(self, batch: Batch, scale: jax.Array) -> dict[str, jax.Array]:
        """Metrics and auxiliary losses are means over tokens, whatever the loss is a mean over."""
        tokens = NextToken().weights(batch, scale)
        if self.config.loss != "dr_grpo":
            return {"loss": tokens, "tokens": tokens}
        return {"loss": batch["loss_mask"] * (scale / (self.replies * self.config.max_tokens)), "tokens": tokens}

    def sums(self, model: ModelDef, params, batch: Batch, weights: dict[str, jax.Array]):
        """Besides the auxiliary ones, the parts are sums over tokens of the metrics that `metrics` names."""
        batch, weights = in_order((batch, weights), model.execution)
        nll, aux = token_nll_of(model, params, batch, weights["tokens"])
        # What weighs nothing may be as unlikely as it is: infinity times 0 is no number.
        learned = weights["tokens"] > 0
        change = jnp.where(learned, -nll - batch[SAMPLED], 0)
        losses, clipped = policy_loss(change, batch[ADVANTAGES], self.config.clip_low, self.config.clip_high)
        of_tokens = {
            "ratio": jnp.exp(change),
            "clipped_fraction": clipped,
            "sampling_gap": jnp.abs(change),
            "surprise": nll,
        }
        if self.reference:
            reference, _ = token_nll_of(self.reference, model.frozen, batch, weights["tokens"])
            of_tokens["divergence"] = divergence(*(jnp.where(learned, -a, 0) for a in (nll, reference)))
            losses = losses + self.config.beta * of_tokens["divergence"]
        loss = jnp.sum(weights["loss"] * losses)
        parts = {"loss": loss} | {name: jnp.sum(weights["tokens"] * values) for name, values in of_tokens.items()}
        return with_auxiliary(loss, aux), jax.lax.stop_gradient(parts) | aux

    def metrics(self, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """loss; means over tokens: ratio (of a token's probability to that with which it was sampled),
        clipped_fraction (of those whose gradient the clip took), sampling_gap (how far its log-probability is from the
        sampler's; in the first step with new replies what training and serving differ by), surprise (minus its
        log-probability, an estimate of the entropy) and, with a reference, divergence; and `loads`."""
        names = ("loss", "ratio", "clipped_fraction", "sampling_gap", "surprise", "divergence")
        return {name: parts[name] for name in names if name in parts} | loads(parts)


def check_policy(config: RunConfig) -> None:
    """Refuses what does not go with config.grpo, before anything compiles."""
    grpo, train = config.grpo, config.train
    if not grpo.reward:
        return
    what = f"grpo.reward={','.join(grpo.reward)}"
    if config.preference.beta:
        raise ShardlmError(
            f"{what} with preference.beta={config.preference.beta}: choose one; set preference.beta to 0, or leave "
            "grpo.reward out"
        )
    if config.data.weights:
        raise ShardlmError(
            f"{what} with data.weights={config.data.weights}: weights share out tokens, and prompts are taken one as "
            "often as the other; leave data.weights out, and name a file of prompts twice to take it twice as often"
        )
    if not isinstance(config.model, Pretrained):
        raise ShardlmError(f"{what} with new weights: replies are a checkpoint's; set model to Pretrained(FOLDER)")
    if train.global_batch % grpo.group_size:
        near = max(1, train.global_batch // grpo.group_size) * grpo.group_size
        raise ShardlmError(
            f"train.global_batch={train.global_batch} replies are no groups of grpo.group_size={grpo.group_size}; "
            f"choose a batch of {near}, or other groups"
        )
    if grpo.max_tokens >= train.seq_len:
        raise ShardlmError(
            f"grpo.max_tokens={grpo.max_tokens} leaves no room for prompts in rows of train.seq_len={train.seq_len}; "
            f"set train.seq_len to more than {grpo.max_tokens}, by the length of the prompts"
        )
    if apart(config):
        raise ShardlmError(
            f"{what} with replicas that exchange in their own way (slow_link, local_sgd or train.shares): replies are "
            "averaged over the whole batch every step; leave those as they are"
        )
    if config.mesh.pipeline != 1:
        raise ShardlmError(
            f"{what} with mesh.pipeline={config.mesh.pipeline}: stages train on next tokens; give the devices of "
            "pipeline to fsdp or tensor"
        )
    if config.offload.params:
        raise ShardlmError(
            f"{what} with offload.params: replies are sampled with the weights on the device; set offload.params to "
            "False (offload.optimizer works)"
        )
    if config.lora.rank and config.lora.base != "dtype":
        raise ShardlmError(
            f"{what} with lora.base={config.lora.base}: the weights that sample are those that adapters stand on with "
            "them added; set lora.base to dtype"
        )
    if train.z_loss or train.baselines or config.data.packing in ("pairs", "labelled"):
        raise ShardlmError(
            f"{what} with train.z_loss={train.z_loss}, train.baselines={train.baselines} and data.packing="
            f"{config.data.packing}: these are of other objectives; set train.z_loss to 0, train.baselines to False "
            "and data.packing to cut"
        )
