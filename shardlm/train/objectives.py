"""What a run makes smaller: the loss of next tokens, beside a teacher's or alone, of preferences, or of rewarded
replies."""

from shardlm.state import ModelDef
from shardlm.train.distill import Distillation
from shardlm.train.kto import Prospect
from shardlm.train.policy import Policy
from shardlm.train.preference import Preference
from shardlm.train.settled import Settled
from shardlm.train.step import NextToken, Objective


def objective_of(settled: Settled, model: ModelDef) -> Objective:
    """The run's; under its mesh."""
    config = settled.config
    if config.preference.beta:
        return (Prospect if config.preference.loss == "kto" else Preference).make(config.preference, model)
    if config.grpo.reward:
        return Policy.make(config.grpo, config.train.global_batch, model)
    if settled.teacher:
        return Distillation.make(config, settled.teacher.shape, settled.teacher.execution)
    return NextToken(config.train.z_loss, config.train.mtp_loss)
