"""The configuration of a training run: what a file in configs/ returns."""

import dataclasses
from typing import Any, Literal

from shardlm.checkpoint import CheckpointConfig
from shardlm.data.config import DataConfig
from shardlm.errors import ShardlmError
from shardlm.layers.stack import Remat
from shardlm.mesh import MeshSpec
from shardlm.ops.attention import Implementation
from shardlm.optim import OptimConfig
from shardlm.precision import Precision
from shardlm.rules import Preset


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length, batch and supervision of a run.

    steps          updates
    global_batch   rows in one update, over all devices and microbatches
    seq_len        tokens in a row
    accumulation   microbatches an update is summed over; on a mesh with pipeline stages they go through them
    z_loss         weight of the squared log-partition; 1e-4 where logits drift
    seed           of the initial weights
    log_every      steps between metric lines
    eval_every     steps between evaluations
    eval_batches   validation batches an evaluation reads; 0 reads all
    max_bad_steps  non-finite steps in a row that stop the run; each is skipped and reported
    baselines      compare the final validation loss with unigram and bigram models of the training tokens
    sample_prompt  at the end, show what the model makes of this text; "" shows nothing
    """

    steps: int = 1000
    global_batch: int = 64
    seq_len: int = 1024
    accumulation: int = 1
    z_loss: float = 0.0
    seed: int = 0
    log_every: int = 10
    eval_every: int = 250
    eval_batches: int = 0
    max_bad_steps: int = 3
    baselines: bool = False
    sample_prompt: str = ""

    def __post_init__(self):
        for name in ("steps", "global_batch", "seq_len", "accumulation", "log_every", "eval_every", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ShardlmError(f"train.{name}={getattr(self, name)}: it must be at least 1")


PipelineSchedule = Literal["circular", "gpipe", "1f1b"]


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How train.accumulation microbatches go through the stages of mesh.pipeline.

    schedule  circular  a stage holds several runs of layers and microbatches go round `rounds` times: least idle time
              gpipe     one round
              1f1b      one round, with memory that does not grow with the number of microbatches
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
    pipeline     schedule of mesh.pipeline's stages
    unroll       layers in one iteration of the scan; 0: all, for speed where compile time does not matter
    xla_profile  named compiler options; "auto" picks by GPU generation (xla_options.py)
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
    pipeline: PipelineConfig = PipelineConfig()
    unroll: int = 1
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    xla_profile: str = "auto"
    run_dir: str = "runs/default"
    cpu_devices: int = 0
