"""The configuration of a training run: what a file in configs/ returns."""

import dataclasses
from typing import Any, Literal

from shardlm.checkpoint import CheckpointConfig
from shardlm.data.config import DataConfig
from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.stack import Remat
from shardlm.mesh import MeshSpec
from shardlm.metrics.trackers import TrackerName
from shardlm.ops.attention import ContextAttention, Implementation
from shardlm.ops.distillation import Divergence, Kind
from shardlm.ops.quantized_matmul import Matmul
from shardlm.optim import OptimConfig
from shardlm.precision import Precision
from shardlm.rules import Preset
from shardlm.train.compression import Compression
from shardlm.vision.parts import EncoderPart

PolicyLoss = Literal["dapo", "grpo", "dr_grpo"]
PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "kto"]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length, batch and supervision of a run.

    steps          updates
    global_batch   rows in one update, over all devices and microbatches
    seq_len        tokens in a row
    accumulation   microbatches an update is summed over; on a mesh with pipeline stages they go through them
    shares         of replicas that differ in speed: the microbatches of each in a step, for instance (1, 3); empty:
                   train.accumulation for all
    z_loss         weight of the squared log-partition; 1e-4 where logits drift
    mtp_loss       weight of the loss of modules that predict further tokens, where the model has any (mtp.py)
    encoder        what is trained of a checkpoint's encoder of images, beside its language model or adapters on that:
                   "frozen" nothing, "projector" what brings its vectors into the text's width, "all"
                   (learned_encoder.py)
    seed           of the initial weights
    log_every      steps between metric lines
    eval_every     steps between evaluations
    eval_batches   validation batches an evaluation reads, with data.weights of each source; 0 reads all
    max_bad_steps  non-finite steps in a row that stop the run; each is skipped and reported
    stuck_seconds  without a sign of life after which a run ends, saying what each process was doing (stuck.py);
                   0: never, as under a debugger
    baselines      compare the final validation loss with unigram and bigram models of the training tokens
    sample_prompt  at the end, show what the model makes of this text; "" shows nothing
    """

    steps: int = 1000
    global_batch: int = 64
    seq_len: int = 1024
    accumulation: int = 1
    shares: tuple[int, ...] = ()
    z_loss: float = 0.0
    mtp_loss: float = 0.3
    encoder: EncoderPart = "frozen"
    seed: int = 0
    log_every: int = 10
    eval_every: int = 250
    eval_batches: int = 0
    max_bad_steps: int = 3
    stuck_seconds: float = 1800.0
    baselines: bool = False
    sample_prompt: str = ""

    def __post_init__(self):
        for name in ("steps", "global_batch", "seq_len", "accumulation", "log_every", "eval_every", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ShardlmError(f"train.{name}={getattr(self, name)}: it must be at least 1")
        for name in ("mtp_loss", "stuck_seconds"):
            if getattr(self, name) < 0:
                raise ShardlmError(f"train.{name}={getattr(self, name)}: it must be at least 0")
        if any(share < 1 for share in self.shares):
            raise ShardlmError(f"train.shares={self.shares}: each replica takes at least 1 microbatch")


@dataclasses.dataclass(frozen=True)
class SlowLinkConfig:
    """How replicas exchange gradients over mesh.data, where a slow link joins them (train/compression.py).

    compression  of what is sent, with error feedback
    rank         of PowerSGD's factors
    """

    compression: Compression = "none"
    rank: int = 4

    def __post_init__(self):
        if self.rank < 1:
            raise ShardlmError(f"slow_link.rank={self.rank}: it must be at least 1")


@dataclasses.dataclass(frozen=True)
class LocalSgdConfig:
    """Replicas over mesh.data that train apart and meet seldom: local SGD and DiLoCo (train/diloco.py).

    inner_steps          steps between two exchanges of the same weights; 0: gradients are exchanged every step
    outer_learning_rate  of the step that the replicas' average makes from where they started
    outer_momentum       of that step, Nesterov's; 0 with outer_learning_rate=1 averages the weights
    fragments            groups of layers that are exchanged in turn, evenly spread over the inner steps
    overlap              inner steps that go on while a fragment is on its way; 0: all wait for it
    mixing               how much of its own a replica keeps of a fragment that arrives; 0: nothing
    """

    inner_steps: int = 0
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0

    def __post_init__(self):
        if self.inner_steps < 0 or self.overlap < 0 or self.fragments < 1:
            raise ShardlmError(
                f"local_sgd.inner_steps={self.inner_steps}, overlap={self.overlap}, fragments={self.fragments}: "
                "inner_steps and overlap are at least 0, fragments at least 1"
            )
        if self.outer_learning_rate <= 0 or not 0 <= self.outer_momentum < 1 or not 0 <= self.mixing < 1:
            raise ShardlmError(
                f"local_sgd.outer_learning_rate={self.outer_learning_rate}, outer_momentum={self.outer_momentum}, "
                f"mixing={self.mixing}: the rate is positive, momentum and mixing are at least 0 and below 1"
            )
        if self.inner_steps and self.inner_steps // self.fragments < max(1, self.overlap):
            raise ShardlmError(
                f"local_sgd.inner_steps={self.inner_steps} with fragments={self.fragments} leaves "
                f"{self.inner_steps // self.fragments} steps to a fragment, and overlap={self.overlap}; each fragment "
                f"needs at least {max(1, self.overlap)}: choose inner_steps of at least "
                f"{self.fragments * max(1, self.overlap)}, or fewer fragments"
            )


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """Training of a checkpoint on preferences (train/preference.py), on pairs or, by kto, on answers that are wanted or
    not (data.packing).

    beta             how strongly the model is held to the checkpoint: 0.1 is common; 0: training on next tokens. Of
                     simpo and orpo, which hold it to nothing, the weight of what is preferred: 2 and 0.1 are common
    loss             of a pair, by TRL's names (ops/preference.py): "sigmoid" (DPO), "ipo", "hinge" (SLiC), without a
                     reference "simpo" and "orpo"; and of single answers "kto" (kto.py)
    gamma            margin that simpo asks for between the rewards of both answers
    label_smoothing  probability that a pair's label is wrong (conservative DPO); of sigmoid and simpo
    sft_weight       of the chosen answer's loss a token, added to the pair's (https://arxiv.org/abs/2404.19733); orpo
                     has its own
    desirable_weight, undesirable_weight  of kto, of the losses of answers that are wanted and of others: where there
                     are more of the one, the other may weigh more
    """

    beta: float = 0.0
    loss: PreferenceLoss = "sigmoid"
    gamma: float = 0.5
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self):
        values = f"beta={self.beta}, label_smoothing={self.label_smoothing}, sft_weight={self.sft_weight}"
        if self.beta < 0 or not 0 <= self.label_smoothing < 0.5 or self.sft_weight < 0:
            raise ShardlmError(
                f"preference.{values}: beta and sft_weight are at least 0, label_smoothing at least 0 and below 0.5"
            )
        others = self.loss != "sigmoid" or self.gamma != PreferenceConfig.gamma
        if not self.beta and (others or self.label_smoothing or self.sft_weight):
            raise ShardlmError(
                f"preference.loss={self.loss}, gamma={self.gamma}, {values}: without beta the others mean nothing; set "
                "beta, or leave the others as they are"
            )
        self._check_meaning()

    def _check_meaning(self) -> None:
        if self.gamma < 0 or (self.gamma != PreferenceConfig.gamma and self.loss != "simpo"):
            raise ShardlmError(
                f"preference.gamma={self.gamma} with preference.loss={self.loss}: it is simpo's margin, at least 0; "
                f"leave it at {PreferenceConfig.gamma} with other losses"
            )
        if self.label_smoothing and self.loss not in ("sigmoid", "simpo"):
            raise ShardlmError(
                f"preference.label_smoothing={self.label_smoothing} with preference.loss={self.loss}: it means "
                "something for sigmoid and simpo; set it to 0"
            )
        if self.sft_weight and self.loss in ("orpo", "kto"):
            why = "has no pairs" if self.loss == "kto" else "has the chosen answer's loss in it, against beta's"
            raise ShardlmError(
                f"preference.sft_weight={self.sft_weight} with preference.loss={self.loss}, which {why}; set "
                "sft_weight to 0"
            )
        weights = self.desirable_weight, self.undesirable_weight
        if min(weights) < 0 or not any(weights) or (weights != (1, 1) and self.loss != "kto"):
            raise ShardlmError(
                f"preference.desirable_weight={weights[0]}, undesirable_weight={weights[1]} with preference.loss="
                f"{self.loss}: they are kto's, at least 0 and not both 0; leave them at 1 with other losses"
            )

    @property
    def compares(self) -> bool:
        """Whether the loss compares the model with the checkpoint as it was, which is held for it."""
        return self.beta > 0 and self.loss not in ("simpo", "orpo")


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    """Reinforcement learning of a checkpoint on its own replies (shardlm/reinforce/): group relative policy
    optimisation (GRPO, https://arxiv.org/abs/2402.03300, section 4.1). train.global_batch is the number of replies.

    reward          functions that judge replies, "package.module:function" or "file.py:function", in TRL's form; their
                    sum counts; empty: no reinforcement learning
    group_size      replies to each prompt, which are judged against each other
    max_tokens      of a reply
    updates         steps that are made with the same replies
    beta            weight of the divergence from the checkpoint (KL); 0: none, and no copy of it
    clip_low        how far a token's probability may fall below that with which it was sampled before its gradient ends
    clip_high       how far it may rise (0.28 in DAPO, https://arxiv.org/abs/2503.14476)
    loss            what a mean is over: "dapo" all tokens, "grpo" replies, and tokens in each, "dr_grpo" replies of
                    max_tokens, however long they are (https://arxiv.org/abs/2503.20783)
    scale_rewards   whether advantages are divided by the standard deviation of their group; Dr. GRPO does not
    mask_truncated  whether replies that max_tokens ended teach nothing
    tensor          devices over which each copy of the model that samples is split; the others hold more copies
    kv_cache_gib    of the pages of those that sample, on each device
    """

    reward: tuple[str, ...] = ()
    group_size: int = 8
    max_tokens: int = 512
    updates: int = 1
    beta: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    loss: PolicyLoss = "dapo"
    scale_rewards: bool = True
    mask_truncated: bool = False
    tensor: int = 1
    kv_cache_gib: float = 4.0

    def __post_init__(self):
        for name, least in (("group_size", 2), ("max_tokens", 1), ("updates", 1), ("tensor", 1)):
            if getattr(self, name) < least:
                raise ShardlmError(f"grpo.{name}={getattr(self, name)}: it must be at least {least}")
        if self.beta < 0 or not 0 < self.clip_low < 1 or self.clip_high <= 0 or self.kv_cache_gib <= 0:
            raise ShardlmError(
                f"grpo.beta={self.beta}, clip_low={self.clip_low}, clip_high={self.clip_high}, "
                f"kv_cache_gib={self.kv_cache_gib}: beta is at least 0, clip_low between 0 and 1, the others above 0"
            )


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Learning from a larger checkpoint beside the data: token by token, where the data's loss counts, from its
    distribution over the whole vocabulary (train/distill.py).

    teacher      its folder, of a model with the same tokenizer and vocabulary; "": none
    weight       of the teacher's loss; that of the data weighs 1 - weight
    temperature  that both models' logits are divided by for the teacher's loss, which is not multiplied by its square
    kind         of that loss: "forward_kl", "reverse_kl" or "jsd" (ops/distillation.py, as TRL's GKD)
    beta         of jsd: the teacher's part in what both are compared with
    """

    teacher: str = ""
    weight: float = 0.5
    temperature: float = 1.0
    kind: Kind = "forward_kl"
    beta: float = 0.5

    def __post_init__(self):
        if not 0 < self.weight <= 1 or self.temperature <= 0 or not 0 < self.beta < 1:
            raise ShardlmError(
                f"distill.weight={self.weight}, temperature={self.temperature}, beta={self.beta}: weight is above 0 "
                "and at most 1, temperature above 0, beta between 0 and 1 (at its ends jsd is nothing: those are "
                "kind=forward_kl and reverse_kl)"
            )
        if self.beta != DistillConfig.beta and self.kind != "jsd":
            raise ShardlmError(
                f"distill.beta={self.beta} with distill.kind={self.kind}: it is of jsd; leave it at "
                f"{DistillConfig.beta}"
            )
        if not self.teacher and (self.weight, self.temperature, self.kind) != (0.5, 1.0, "forward_kl"):
            raise ShardlmError(
                f"distill.weight={self.weight}, temperature={self.temperature}, kind={self.kind}, beta={self.beta} "
                "without distill.teacher mean nothing; name its folder, or leave them as they are"
            )

    @property
    def divergence(self) -> Divergence:
        return Divergence(self.kind, self.temperature, self.beta)


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """What rests in the host's pinned memory between its uses in a step (train/offload.py). Blocks' inputs go there by
    remat="offload".

    optimizer  the optimizer's state and the average of the weights; on the device during the update only
    params     the float32 weights; the device has a copy in the compute dtype during the step
    """

    optimizer: bool = False
    params: bool = False


PipelineSchedule = Literal["circular", "gpipe", "1f1b"]


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How train.accumulation microbatches go through the stages of mesh.pipeline.

    schedule  circular  a stage holds several runs of layers and microbatches go round `rounds` times: least idle time
              gpipe     one round
              1f1b      one round, with memory that does not grow with the number of microbatches; wants remat=full
    rounds    of the circular schedule
    """

    schedule: PipelineSchedule = "circular"
    rounds: int = 2

    def __post_init__(self):
        if self.rounds < 1:
            raise ShardlmError(f"pipeline.rounds={self.rounds}: it must be at least 1")

    @property
    def laps(self) -> int:
        """How often a microbatch goes round the stages."""
        return self.rounds if self.schedule == "circular" else 1


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run.

    model        an architecture's configuration (models/llama.py, ...)
    mesh, rules  how many devices along each axis, and what is split over them (mesh.py, rules.py)
    precision    compute type (precision.py)
    remat        what the backward pass keeps (layers/stack.py)
    attention    "auto", "xla" or "cudnn" (ops/attention.py)
    context_attention  over mesh.context: "auto", "ring" or "ulysses" (ops/attention.py)
    matmul       numbers that projections multiply (ops/quantized_matmul.py)
    lora         adapters that are trained instead of the weights
    preference   training on pairs of answers instead of next tokens
    grpo         training on rewards of the model's own replies
    distill      a teacher beside the data
    offload      what rests in host memory
    pipeline     schedule of mesh.pipeline's stages
    slow_link    compression of what crosses mesh.data
    local_sgd    replicas of mesh.data that meet only every so many steps
    unroll       layers in one iteration of the scan; 0: all, for speed where compile time does not matter: what is kept
                 of layers is not copied into stacks (remat=dots: 5 to 6% of a step, estimated; compiling is 1.4 to 2.5
                 times as long)
    xla_profile  named compiler options; "auto" picks by GPU generation (xla_options.py)
    trackers     experiment trackers that get the metrics too: "wandb", "mlflow", "trackio" (metrics/trackers.py)
    run_dir      checkpoints, logs, configuration and tokenizer go here; an interrupted run resumes from here
    cpu_devices  virtual CPU devices to make; 0 uses the real devices
    """

    model: Any
    data: DataConfig = DataConfig()
    mesh: MeshSpec = MeshSpec(data=-1)
    rules: Preset = "zero3"
    precision: Precision = "bf16"
    remat: Remat = "full"
    attention: Implementation = "auto"
    context_attention: ContextAttention = "auto"
    matmul: Matmul = "dtype"
    lora: LoraConfig = LoraConfig()
    preference: PreferenceConfig = PreferenceConfig()
    grpo: GrpoConfig = GrpoConfig()
    distill: DistillConfig = DistillConfig()
    offload: OffloadConfig = OffloadConfig()
    pipeline: PipelineConfig = PipelineConfig()
    unroll: int = 1
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    slow_link: SlowLinkConfig = SlowLinkConfig()
    local_sgd: LocalSgdConfig = LocalSgdConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    xla_profile: str = "auto"
    trackers: tuple[TrackerName, ...] = ()
    run_dir: str = "runs/default"
    cpu_devices: int = 0

    def __post_init__(self):
        if not self.run_dir:
            raise ShardlmError("run_dir is empty: name a folder, such as runs/mine, or . for this one")
        if not hasattr(self.model, "transformer"):
            raise ShardlmError(
                f"model={self.model!r} is no architecture: give its configuration, as LlamaConfig(...) of "
                "shardlm.models.llama, or Pretrained(FOLDER) of shardlm.models.pretrained"
            )
