"""Distillation: training on texts or chats beside a teacher, a checkpoint of any family, layers and width with the same
vocabulary, whose distribution over all tokens the model learns where the loss of the data counts
(https://arxiv.org/abs/1503.02531, https://arxiv.org/abs/2306.13649)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from shardlm.errors import ShardlmError
from shardlm.hf_files import texts_beside
from shardlm.layers.lora import LoraConfig
from shardlm.layers.packed import Packed
from shardlm.layers.param import Execution
from shardlm.models.pretrained import Pretrained
from shardlm.models.transformer import Transformer
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.distillation import Head, Shares, distillation
from shardlm.ops.schemes import SCHEMES
from shardlm.state import TEACHER, ModelDef
from shardlm.tokenizer import Tokenizer
from shardlm.train.config import DistillConfig, OffloadConfig, RunConfig
from shardlm.train.replicas import apart
from shardlm.train.step import Batch, NextToken, head_layout, in_order, loads, with_auxiliary


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The objective: over the tokens of a batch, the mean of the data's cross-entropy and of the divergence from the
    teacher, each with its weight.

    teacher  whose weights are TEACHER of `TrainState.frozen`, on the same mesh, in the compute dtype
    """

    config: DistillConfig
    z_loss: float
    teacher: ModelDef
    counted = "tokens"
    reported = ("loss", "divergence")
    columns = ()

    @classmethod
    def make(cls, config: RunConfig, shape: TransformerConfig, execution: Execution) -> "Distillation":
        """By a teacher of this shape; under the run's mesh."""
        return cls(config.distill, config.train.z_loss, ModelDef.make(shape, execution))

    def count(self, batch: Batch) -> jax.Array:
        return NextToken().count(batch)

    def used(self, batch: Batch, microbatches: int) -> int:
        return microbatches

    def weights(self, batch: Batch, scale: jax.Array) -> jax.Array:
        return NextToken().weights(batch, scale)

    def sums(self, model: ModelDef, params: Any, batch: Batch, weights: jax.Array):
        batch, weights = in_order((batch, weights), model.execution)
        lm, teacher = model.model(params), self.teacher.model(model.frozen[TEACHER])
        hidden, aux = _hidden(lm, batch, weights)
        taught, _ = _hidden(teacher, batch, weights)
        total, parts = distillation(
            _head(lm, hidden),
            _head(teacher, jax.lax.stop_gradient(taught)),
            batch["targets"],
            weights,
            layouts=(head_layout(lm), head_layout(teacher)),
            of=self.config.divergence,
            shares=Shares(self.config.weight, self.z_loss),
        )
        return with_auxiliary(total, aux), parts | aux

    def metrics(self, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Means over tokens: loss, that of the data alone, z_loss, and divergence, from the teacher; and `loads`."""
        own = {"loss": parts["nll"], "z_loss": parts["z_loss"], "divergence": parts["divergence"]}
        return own | loads(parts)


def _hidden(lm: Transformer, batch: Batch, weights: jax.Array):
    """([B, T, D] of the last block, the layers' auxiliary values)."""
    hidden, _, aux = lm(batch["tokens"], batch["positions"], Packed.of_rows(batch, weights, lm.execution))
    return hidden, aux


def _head(lm: Transformer, hidden: jax.Array) -> Head:
    return Head(hidden, lm.head_param()[...], lm.bias_of_head())


def of_teacher(config: RunConfig) -> RunConfig:
    """The run that would train the teacher on the same rows and devices, of which it makes the forward pass: as it is,
    where the student is rounded to what it will be served in."""
    length = config.model.length if isinstance(config.model, Pretrained) else 0
    return dataclasses.replace(
        config,
        model=Pretrained(config.distill.teacher, length, mtp=False),
        distill=DistillConfig(),
        matmul="dtype" if config.matmul in SCHEMES else config.matmul,
        lora=LoraConfig(),
        offload=OffloadConfig(),
        train=dataclasses.replace(config.train, encoder="frozen"),
    )


def check_distill(config: RunConfig) -> None:
    """Refuses what does not go with config.distill, before anything compiles."""
    if not config.distill.teacher:
        return
    what = f"distill.teacher={config.distill.teacher}"
    if config.preference.beta or config.grpo.reward:
        given = f"preference.beta={config.preference.beta}" if config.preference.beta else "grpo.reward"
        raise ShardlmError(
            f"{what} with {given}: a teacher is learned from beside texts and chats, not beside preferences or on the "
            "model's own replies; choose one of both"
        )
    if config.distill.weight == 1 and config.train.z_loss:
        raise ShardlmError(
            f"{what} with distill.weight=1 and train.z_loss={config.train.z_loss}: that belongs to the data's loss, "
            "which weighs nothing then; set train.z_loss to 0, or distill.weight below 1"
        )
    if config.mesh.pipeline != 1:
        raise ShardlmError(
            f"{what} with mesh.pipeline={config.mesh.pipeline}: stages do not run the teacher; give the devices of "
            "pipeline to fsdp or tensor"
        )
    if apart(config):
        raise ShardlmError(
            f"{what} with replicas that exchange in their own way (slow_link, local_sgd or train.shares): the teacher "
            "stands on the whole mesh; leave those as they are"
        )


def check_same_rows(config: RunConfig, student: Any, teacher: Any) -> None:
    """Refuses a teacher that has other tokens, or them in another order over the context axis; each of the two is
    (shape, execution)."""
    what, sizes = f"distill.teacher={config.distill.teacher}", [shape.vocab_size for shape, _ in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ShardlmError(
            f"{what} predicts {sizes[1]} tokens and the model {sizes[0]}: both are compared token by token; choose a "
            "teacher with the same vocab_size in its config.json, by which sizes of one family may differ, or a model "
            "with as many (model.vocab_size)"
        )
    ways = [execution.context_attention for _, execution in (student, teacher)]
    if config.mesh.context > 1 and ways[0] != ways[1]:
        raise ShardlmError(
            f"{what} goes over context={config.mesh.context} by {ways[1]} and the model by {ways[0]}, which have "
            "tokens in another order: set context_attention to one that both take, or mesh.context to 1"
        )


def check_tokenizers(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Refuses a teacher whose tokens are other ones than the data's."""
    if not (folder := config.distill.teacher):
        return
    own, taught = tokenizer.vocabulary, Tokenizer.load(texts_beside(Path(folder))).vocabulary
    differ = [token for token, number in own.items() if taught.get(token) != number]
    if differ:
        first = min(differ, key=own.get)
        raise ShardlmError(
            f"distill.teacher={folder} has another tokenizer than data.tokenizer={config.data.tokenizer}: "
            f"{len(differ)} of {len(own)} tokens have other numbers there, as {first!r}, {own[first]} here and "
            f"{taught.get(first, 'none')} there; "
            "choose a teacher of the same tokenizer"
        )
