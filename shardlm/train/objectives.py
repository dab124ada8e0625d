"""What a run makes smaller: the loss of next tokens, of preferences, or of rewarded replies."""

from shardlm.state import ModelDef
from shardlm.train.config import RunConfig
from shardlm.train.policy import Policy
from shardlm.train.preference import Preference
from shardlm.train.step import NextToken, Objective


def objective_of(config: RunConfig, model: ModelDef) -> Objective:
    """The run's; under its mesh."""
    if config.preference.beta:
        return Preference.make(config.preference, model)
    if config.grpo.reward:
        return Policy.make(config.grpo, config.train.global_batch, model)
    return NextToken(config.train.z_loss, config.train.mtp_loss)
