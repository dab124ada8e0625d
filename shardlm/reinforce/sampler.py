"""Copies of the model that is trained, which sample on the same devices: an engine of shardlm/serve whose weights are
replaced before it samples."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardlm.errors import ShardlmError
from shardlm.merge import added
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.precision import COMPUTE_DTYPE
from shardlm.serve.llm import LLM
from shardlm.serve.outputs import CompletionOutput, whole
from shardlm.serve.sampling_params import SamplingParams
from shardlm.state import ModelDef
from shardlm.train.config import RunConfig

MAX_ROWS = 256  # that a copy samples at once; no more than its share of the replies, so that fewer programs compile


@dataclasses.dataclass(frozen=True)
class Sampler:
    """`llm` and the model whose weights it is given."""

    llm: LLM
    model: ModelDef

    @classmethod
    def make(cls, config: RunConfig, model: ModelDef, devices: int) -> "Sampler":
        """Of config.model's checkpoint, over all devices. Raises ShardlmError for what does not fit."""
        grpo = config.grpo
        if devices % grpo.tensor:
            choices = [str(n) for n in range(1, devices + 1) if devices % n == 0]
            raise ShardlmError(
                f"grpo.tensor={grpo.tensor} does not divide {devices} devices; choose from {', '.join(choices)}"
            )
        check_longest(config.model, config.train.seq_len)
        check_rotation(config.model, config.train.seq_len)
        copies = devices // grpo.tensor
        llm = LLM(
            config.model.folder,
            mesh=MeshSpec(data=copies, tensor=grpo.tensor),
            max_num_seqs=min(MAX_ROWS, -(-config.train.global_batch // copies)),
            dtype=jnp.dtype(COMPUTE_DTYPE[config.precision]).name,
            quantization="dtype",
            max_model_len=config.train.seq_len,
            kv_cache_bytes=int(grpo.kv_cache_gib * 2**30 * devices),
        )
        return cls(llm, model)

    def update(self, params: Any, frozen: Any) -> None:
        """Samples with these weights of a training state from now on."""
        lora = self.model.execution.lora
        if lora.rank:
            params = added(frozen, params, factor=lora.alpha / lora.rank)
        self.llm.update_weights(params)

    def sample(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[CompletionOutput]]:
        """The replies to each prompt. Raises EngineError where one broke."""
        asked = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        return [output.outputs for output in whole(self.llm.generate(asked, params, use_tqdm=False))]


def check_longest(model: Pretrained, seq_len: int) -> None:
    """Refuses rows beyond the positions that a checkpoint is said to be made for, to which what samples keeps."""
    longest = registry.longest(model.options)
    if longest and seq_len > longest:
        raise ShardlmError(
            f"train.seq_len={seq_len} is more than the {longest} positions that {model.folder} is made for, beyond "
            f"which no reply is sampled; set train.seq_len to at most {longest}"
        )


def check_rotation(model: Pretrained, seq_len: int) -> None:
    """Refuses a model that is trained with another rotation than it samples with: what samples has that of rows of
    seq_len, and what is trained that of model.length."""
    trained, sampling = (dataclasses.replace(model, length=n).transformer() for n in (model.length, seq_len))
    for one, other in zip(trained.attention_kinds, sampling.attention_kinds, strict=True):
        if not one.rope:
            continue
        a, b = (kind.rope.frequencies(getattr(kind, "rope_dim", kind.head_dim)) for kind in (one, other))
        if not np.array_equal(a, b) or one.rope.magnitude != other.rope.magnitude:
            raise ShardlmError(
                f"model.length={model.length} with train.seq_len={seq_len}: the rotation of {model.folder} depends on "
                "the longest row, and replies would be sampled with another than is trained; set model.length to "
                f"{seq_len}"
            )
