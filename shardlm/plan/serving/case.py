"""What a serving plan is asked: a model, by a configuration or a config.json without weights, the engine's options
(serve/engine_config.py's EngineConfig, whose names and defaults launch.serve has too), lengths and how much is asked
for."""

import dataclasses
import functools
import json
import math
import os
import pathlib

import jax.numpy as jnp

from shardlm.errors import ShardlmError
from shardlm.execution import DTYPES, stored_dtype
from shardlm.gguf_files.ollama import installed
from shardlm.hf_files import home, read_config
from shardlm.hf_quantised import supported
from shardlm.layers.mtp import MtpConfig
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.weight_format import PUBLISHED, WeightFormat
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.images import Images, Seen, images_of, seen_of
from shardlm.plan.serving.mix import Mix, made_up
from shardlm.precision import COMPUTE_DTYPE
from shardlm.published_weights import as_published, kinds_of, not_published
from shardlm.serve.bench.workload import check_shared
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.entries import fitted, paged
from shardlm.serve.snapshots import LEAST
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.serve.speculation.eagle_files import Head, describe_head
from shardlm.serve.speculation.eagle_files import check as check_head
from shardlm.serve.submeshes import of_stage
from shardlm.serving_rules import serving_rules
from shardlm.state import check_positions_in_keys
from shardlm.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """shape    without modules that predict further tokens: they only draft
    dtype    that the engine computes in unless told otherwise
    longest  positions that the model was made for; 0: not said
    mtp      those modules, where it has any
    folder   of a checkpoint in few bits, whose config.json at least is there; "": it is none
    seen     what it sees by, where it does
    head     what its folder says, where it is a head that drafts by the streams of another (EAGLE-3)
    """

    name: str
    shape: TransformerConfig
    dtype: str
    longest: int
    mtp: MtpConfig | None = None
    folder: str = ""
    seen: Seen | None = None
    head: Head | None = None

    @classmethod
    def drafting(cls, asked: SpeculativeConfig | None, length: int = 0) -> "ServedModel | None":
        """What drafts that are asked for come from, where that has weights of its own. Raises as `of_folder`."""
        if asked is None or asked.model is None:
            return None
        if asked.method != "eagle3":
            return cls.of_folder(asked.model, length, sees=False)
        head = describe_head(asked.model, length)
        return cls(pathlib.Path(asked.model).name, head.shape, stored_dtype(head.source), 0, head=head)

    @classmethod
    def of_config(cls, config: RunConfig, name: str = "") -> "ServedModel":
        """What a run of this configuration trains; `name` by default that of its family."""
        dtype = jnp.dtype(COMPUTE_DTYPE[config.precision]).name
        shape, name = config.model.transformer(), name or type(config.model).__name__
        return cls(name, shape.without_mtp(), dtype, config.train.seq_len, shape.mtp)

    @classmethod
    def of_folder(cls, path: str | os.PathLike, length: int = 0, sees: bool = True) -> "ServedModel":
        """A Hugging Face folder or what is opened as one, or a config.json alone: no weights are read. `length` as
        max_model_len; without `sees` its text alone is served. Raises ShardlmError where there is none, or for an
        architecture that shardlm does not have."""
        given = pathlib.Path(path)
        path = home(given if given.exists() else installed(str(path)) or given)
        if not path.is_dir() and path.name != "config.json":  # another one beside it would be planned for
            raise ShardlmError(f"{path} is neither a folder nor a config.json; give the folder of a Hugging Face model")
        folder = path if path.is_dir() else path.parent
        options = read_config(folder)
        source = Pretrained(str(folder), length, config=json.dumps(dict(options)))
        shape = source.transformer()
        few = str(folder) if supported(options) else ""
        name = folder.name if given == path else given.name
        longest = registry.longest(options)
        seen = seen_of(folder, options, shape.embed_dim) if sees else None
        return cls(name or str(given), shape.without_mtp(), stored_dtype(source), longest, shape.mtp, few, seen)


@dataclasses.dataclass(frozen=True)
class ServingCase:
    """engine         as launch.serve makes it; mesh.data counts replicas
    prompt_len     tokens of a prompt
    output_len     tokens of a reply
    range_ratio    both are spread evenly over 1 - range_ratio to 1 + range_ratio times that
    shared_prefix  tokens that all prompts begin with
    file           that requests are of, and `listed` what they are like (mix.of_file): lengths are then their means
    request_rate   requests a second that are to be served; 0: as many as possible
    ttft_seconds   the longest mean time to the first token that will do; 0: any
    itl_seconds    the longest time between two tokens of a reply that will do; 0: any
    attainment     the share of requests that must keep those two, the second on average of a reply; 0: they hold for
                   the mean of all requests
    acceptance_rate  share of the drafted tokens that the model accepts, as servers report it; 0: nothing drafts
    draft          the model that drafts, where one does
    images_per_prompt  images before each prompt, of image_size pixels (height, width), none of them another's
    splits         positions of pages may be split over devices where that serves more (serving_rules.py)
    """

    model: ServedModel
    cluster: Cluster
    engine: EngineConfig
    prompt_len: int
    output_len: int
    request_rate: float = 0.0
    ttft_seconds: float = 0.0
    itl_seconds: float = 0.0
    attainment: float = 0.0
    acceptance_rate: float = 0.0
    draft: ServedModel | None = None
    range_ratio: float = 0.0
    shared_prefix: int = 0
    file: str = ""
    listed: Mix | None = None
    images_per_prompt: int = 0
    image_size: tuple[int, int] = (512, 512)
    splits: bool = False

    def __post_init__(self):
        if self.cluster.measured is not None:
            raise ShardlmError(
                "a serving plan is by the table of GPUs and takes no measured profile: give --gpu=NAME instead of "
                "--profile or --gpu=local"
            )
        object.__setattr__(self, "engine", fitted(paged(self.engine, "gpu"), self.model.shape))  # as engines
        if self.prompt_len < 1 or self.output_len < 1:
            raise ShardlmError(
                f"prompt_len={self.prompt_len} and output_len={self.output_len}: a request has at least 1 token of each"
            )
        for name in ("request_rate", "ttft_seconds", "itl_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ShardlmError(f"{name}={getattr(self, name)} is a number of at least 0; 0 asks for nothing")
        if self.attainment and not (0.5 <= self.attainment < 1 and (self.ttft_seconds or self.itl_seconds)):
            raise ShardlmError(
                f"attainment={self.attainment:g} is the share of requests that must keep ttft_seconds="
                f"{self.ttft_seconds:g} and itl_seconds={self.itl_seconds:g}: from 0.5 to below 1, and one of them "
                "is above 0"
            )
        if self.engine.deterministic:
            raise ShardlmError(
                "a serving plan does not cover deterministic=True, whose programs run a token at a time; leave it out"
            )
        self._check_drafts()
        check_positions_in_keys(self.model.shape, self.engine.kv_cache_dtype)
        gpu = self.cluster.gpu
        if self.engine.quantization == PUBLISHED and not self.model.folder:
            raise not_published(f"{self.model.name} has no such")
        if self.engine.quantization == "fp8_dynamic" and not gpu.multiplies_fp8:
            raise ShardlmError(
                f"quantization=fp8_dynamic on {gpu.name}: its matrix units do not take fp8; choose int8_dynamic, or "
                "fp8 for weights alone"
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
        check_shared(self.shared_prefix, self.prompt_len, self.range_ratio)
        self._check_images()
        if self.mix.longest > self.length:
            raise ShardlmError(self._too_long())

    def _too_long(self) -> str:
        both, raised = self.mix.longest, f"and max_model_len={self.length}; shorten them, or raise max_model_len"
        if self.listed:
            count = sum(kind.prompt + kind.output > self.length for kind in self.listed.kinds)
            return (
                f"{count} of {len(self.listed.kinds)} requests of {self.file} are longer, with their replies, than "
                f"max_model_len={self.length}, the longest {both} tokens; leave them out, or raise max_model_len"
            )
        spread = f" with range_ratio={self.range_ratio:g}" if self.range_ratio else ""
        images = f", {self.images.tokens} tokens of images" if self.images else ""
        lengths = f"prompt_len={self.prompt_len}{images} and output_len={self.output_len}{spread}"
        return f"{lengths} are {f'up to {both}' if spread else both} tokens, {raised}"

    @functools.cached_property
    def mix(self) -> Mix:
        """What its requests are like, as far as this engine shares what they have in common."""
        caching, page = self.engine.enable_prefix_caching, self.engine.block_size
        least = LEAST if self.model.shape.remembers else 0
        if self.listed:
            return dataclasses.replace(self.listed, least=least) if caching else self.listed.unshared
        shared = self.shared_prefix if caching else 0
        images = self.images.tokens if self.images else 0
        mix = made_up(self.prompt_len, self.output_len, self.range_ratio, shared, page, images)
        return dataclasses.replace(mix, least=least)

    @functools.cached_property
    def images(self) -> Images | None:
        """Of each prompt."""
        asked = self.images_per_prompt, self.image_size
        return images_of(self.model.name, self.model.seen, self.engine, *asked, self.length)

    def _check_images(self) -> None:
        beside = [name for name in ("shared_prefix", "file") if getattr(self, name)]
        if self.images and beside:
            raise ShardlmError(
                f"images_per_prompt={self.images_per_prompt} stand before prompts that are made up, and none is "
                f"another's: leave {beside[0]} out"
            )

    def _check_drafts(self) -> None:
        asked, rate = self.engine.speculative_config, self.acceptance_rate
        if asked is None and not rate:
            return
        if asked is None:
            raise ShardlmError(
                f"acceptance_rate={rate:g} is of drafts, which speculative_config asks for: leave it out"
            )
        if not 0 < rate <= 1:
            raise ShardlmError(
                f"speculative_config needs acceptance_rate, the share of drafted tokens that the model accepts, above "
                f"0 and at most 1, not {rate:g}: it depends on the texts; the engine's statistics and launch.bench "
                "serve (draft_acceptance_rate) have it"
            )
        if asked.method == "mtp" and self.model.mtp is None:
            raise ShardlmError(
                f"speculative_config: method 'mtp' drafts by modules that predict further tokens, and "
                f"{self.model.name} has none; choose method 'ngram' or 'draft_model'"
            )
        if self.draft is None:
            return
        if self.draft.head:
            check_head(self.draft.head, self.draft.name, self.model.shape)
            return
        own, wanted = self.draft.shape.vocab_size, self.model.shape.vocab_size
        if own != wanted:
            raise ShardlmError(
                f"the draft model {self.draft.name} has a vocabulary of {own} tokens, and {self.model.name} one of "
                f"{wanted}: they must be the same. Choose a draft model of the same family, or method 'ngram'"
            )
        if self.draft.longest and self.length > self.draft.longest:
            raise ShardlmError(
                f"the draft model {self.draft.name} was made for {self.draft.longest} positions, and max_model_len="
                f"{self.length}: lower that to {self.draft.longest}, or choose another draft model"
            )

    @property
    def tokens_a_step(self) -> float:
        """Of a reply, that one decode step brings on average: the drafts that are accepted and one more."""
        return 1 + self.acceptance_rate * self.engine.drafts

    @property
    def length(self) -> int:
        """max_model_len."""
        return self.engine.max_model_len or self.model.longest

    @property
    def dtype(self) -> str:
        return self.engine.dtype or self.model.dtype

    @property
    def weights(self) -> WeightFormat:
        """What projections and experts are held in; a checkpoint in few bits as its file has it, unless another is
        asked for."""
        asked = self.engine.quantization
        if self.model.folder and asked in (None, PUBLISHED):
            found = _as_published(self.model, of_stage(self.engine.mesh))
            if asked and found == "dtype":
                raise not_published(f"none of {self.model.name} can be held so on the mesh {self.engine.mesh}")
            return found
        return asked or "dtype"

    @property
    def draft_weights(self) -> WeightFormat:
        """The same of a draft model, for which nothing else can be asked (serve/speculation/build.py)."""
        few = self.draft is not None and self.draft.folder
        return _as_published(self.draft, of_stage(self.engine.mesh)) if few else "dtype"

    def on(self, **engine) -> "ServingCase":
        """The same with other options of the engine."""
        return dataclasses.replace(self, engine=dataclasses.replace(self.engine, **engine))


@functools.lru_cache(maxsize=1024)
def _as_published(model: ServedModel, mesh: MeshSpec) -> WeightFormat:
    kinds = kinds_of(Pretrained(model.folder), dataclasses.replace(model.shape, mtp=model.mtp))
    found = as_published(kinds, serving_rules(model.shape, mesh))
    return found if found.kinds else "dtype"
