"""What a serving plan is asked: a model, by a configuration or a config.json without weights, the engine's options
(serve/build.py's EngineConfig, whose names and defaults launch.serve has too), lengths and how much is asked for."""

import dataclasses
import json
import os
import pathlib

import jax.numpy as jnp

from shardlm.errors import ShardlmError
from shardlm.hf_files import read_config
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.models.transformer import TransformerConfig
from shardlm.opened import DTYPES, stored_dtype
from shardlm.ops.grouped_weights import WeightFormat
from shardlm.plan.cluster import Cluster
from shardlm.precision import COMPUTE_DTYPE
from shardlm.serve.build import EngineConfig
from shardlm.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """shape    without modules that predict further tokens: they only draft
    dtype    that the engine computes in unless told otherwise
    longest  positions that the model was made for; 0: not said
    """

    name: str
    shape: TransformerConfig
    dtype: str
    longest: int

    @classmethod
    def of_config(cls, config: RunConfig, name: str = "") -> "ServedModel":
        """What a run of this configuration trains; `name` by default that of its family."""
        dtype = jnp.dtype(COMPUTE_DTYPE[config.precision]).name
        return cls(
            name or type(config.model).__name__, config.model.transformer().without_mtp(), dtype, config.train.seq_len
        )

    @classmethod
    def of_folder(cls, path: str | os.PathLike, length: int = 0) -> "ServedModel":
        """A Hugging Face folder, or a config.json alone: no weights are read. `length` as max_model_len. Raises
        ShardlmError where there is none, or for an architecture that shardlm does not have."""
        path = pathlib.Path(path)
        folder = path if path.is_dir() else path.parent
        options = read_config(folder)
        source = Pretrained(str(folder), length, config=json.dumps(dict(options)))
        longest = registry.text_config(options).get("max_position_embeddings") or options.get("n_positions") or 0
        return cls(folder.name or str(path), source.transformer().without_mtp(), stored_dtype(source), longest)


@dataclasses.dataclass(frozen=True)
class ServingCase:
    """engine         as launch.serve makes it; mesh.data counts replicas
    prompt_len     tokens of a prompt, of which none is in the prefix cache
    output_len     tokens of a reply
    request_rate   requests a second that are to be served; 0: as many as possible
    ttft_seconds   the longest mean time to the first token that will do; 0: any
    itl_seconds    the longest time between two tokens of a reply that will do; 0: any
    """

    model: ServedModel
    cluster: Cluster
    engine: EngineConfig
    prompt_len: int
    output_len: int
    request_rate: float = 0.0
    ttft_seconds: float = 0.0
    itl_seconds: float = 0.0

    def __post_init__(self):
        if self.cluster.measured is not None:
            raise ShardlmError(
                "a serving plan is by the table of GPUs and takes no measured profile: give --gpu=NAME instead of "
                "--profile or --gpu=local"
            )
        if self.prompt_len < 1 or self.output_len < 1:
            raise ShardlmError(
                f"prompt_len={self.prompt_len} and output_len={self.output_len}: a request has at least 1 token of each"
            )
        for name in ("request_rate", "ttft_seconds", "itl_seconds"):
            if getattr(self, name) < 0:
                raise ShardlmError(f"{name}={getattr(self, name)} is at least 0; 0 asks for nothing")
        if self.engine.speculative_config is not None or self.engine.deterministic:
            raise ShardlmError(
                "a serving plan covers neither speculative_config nor deterministic=True: how many drafts are accepted "
                "depends on the texts, and deterministic programs run a token at a time; leave them out"
            )
        if self.dtype not in DTYPES:
            raise ShardlmError(f"dtype={self.dtype!r}; choose from {', '.join(DTYPES)}")
        longest, length = self.model.longest, self.engine.max_model_len
        if longest and length and length > longest:
            raise ShardlmError(
                f"max_model_len={length} is more than the model's {longest} positions; choose at most that"
            )
        if not self.length:
            raise ShardlmError(f"{self.model.name} does not say how long its texts may be; give max_model_len")
        both = self.prompt_len + self.output_len
        if both > self.length:
            raise ShardlmError(
                f"prompt_len={self.prompt_len} and output_len={self.output_len} are {both} tokens, and max_model_len="
                f"{self.length}; shorten them, or raise max_model_len"
            )

    @property
    def length(self) -> int:
        """max_model_len."""
        return self.engine.max_model_len or self.model.longest

    @property
    def dtype(self) -> str:
        return self.engine.dtype or self.model.dtype

    @property
    def weights(self) -> WeightFormat:
        """What projections and experts are held in."""
        return self.engine.quantization or "dtype"

    def on(self, **engine) -> "ServingCase":
        """The same with other options of the engine."""
        return dataclasses.replace(self, engine=dataclasses.replace(self.engine, **engine))
