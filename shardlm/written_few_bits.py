"""A checkpoint that is written in few bits: which of its tensors are, by which scheme, and what config.json says."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict

from shardlm import weights
from shardlm.errors import ShardlmError
from shardlm.hf_files import Planned
from shardlm.hf_quantised import written
from shardlm.layers.block import BlockConfig
from shardlm.mesh import MeshSpec
from shardlm.models.naming import Names, Tensor
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.schemes import SCHEMES, Scheme, SchemeName, on_host
from shardlm.published_weights import parameters
from shardlm.rules import Rules

HEAD = "lm_head"
SOME = 4  # names that a message has


@dataclasses.dataclass(frozen=True)
class InFewBits:
    """A scheme by its name, for one model.

    rounds    names of the tensors that are rounded, as the language model written alone has them
    searched  whether scales are searched (ops/schemes.py)
    """

    name: SchemeName
    rounds: frozenset[str]
    searched: bool = False

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.name]

    def tensors(self, planned: Sequence[Planned]) -> Iterable[Planned]:
        """Those of the checkpoint, of which some are to be rounded."""
        round_ = functools.partial(on_host, scheme=self.scheme, searched=self.searched)
        return written.written(planned, self.scheme.numbers, self.scheme.group, round_)

    def options(self, planned: Sequence[Planned], eyes: Collection[str] = ()) -> Mapping[str, Any]:
        """quantization_config. `eyes`: the tensors of what sees and hears, whose modules libraries call otherwise: they
        are left by a word of their names."""
        end = written.WEIGHT
        matrices = (one.name for one in planned if one.name.endswith(end) and len(one.shape) == 2 and not one.rounds)
        left = dict.fromkeys(name.removesuffix(end) for name in matrices if name not in eyes)
        words = dict.fromkeys(_word(name) for name in eyes)
        ignore = [*left, *(() if HEAD in left else (HEAD,)), *(f"re:.*{re.escape(word)}.*" for word in words)]
        return written.options(self.scheme.numbers, self.scheme.group, bool(self.scheme.served_as), ignore)


def _word(name: str) -> str:
    """What tells the modules of an encoder: model.visual.blocks.0 are in "visual"."""
    return next(word for word in name.split(".") if word not in ("model", "thinker", "encoder"))


def in_few_bits(
    asked: str, config: TransformerConfig, names: Callable[[BlockConfig], Names], trained: str = ""
) -> InFewBits:
    """How a model is written; `trained`: the scheme by which its run rounded, if any, whose numbers are written as they
    were trained. Raises ShardlmError where the architecture's checkpoints have no place for it."""
    if asked not in SCHEMES:
        raise ShardlmError(f"quantization={asked!r}; choose from {', '.join(get_args(SchemeName))}")
    rounds = checked(asked, config, names)
    return InFewBits(asked, rounds, SCHEMES[asked].numbers != "int8" and trained != asked)


def checked(
    name: str, config: TransformerConfig, names: Callable[[BlockConfig], Names], trained: bool = False
) -> frozenset[str]:
    """The names of the tensors that hold projections. `trained`: whether projections alone are rounded, as training
    does, and not what else is in their tensors. Raises ShardlmError for those that this scheme does not write."""
    found, odd, group = set(), {}, SCHEMES[name].group
    for tensor, params in _matrices(config, names):
        theirs = [own for leaf, param in params for own in leaf.names(param.shape)]
        if why := _refused(*zip(*((leaf.tensor, param) for leaf, param in params), strict=True), trained):
            otherwise = "serve the model from 16 bits instead, with --quantization=fp8, int8 or int4"
            raise ShardlmError(
                f"{name} is written of matrices, each result with a scale of its own, and {tensor} {why}; "
                f"{'set matmul to dtype' if trained else otherwise}"
            )
        if not tensor.endswith(written.WEIGHT):
            continue
        inputs = weights.their_shape([(leaf, param.shape) for leaf, param in params])[1]
        if group and inputs % group:
            odd[tensor] = inputs
        found.update(theirs)
    if odd:
        some = ", ".join(f"{tensor} ({inputs})" for tensor, inputs in list(odd.items())[:SOME])
        more = f" and {len(odd) - SOME} more" if len(odd) > SOME else ""
        raise ShardlmError(
            f"{name} has groups of {group} inputs, which do not divide those of {some}{more}; choose FP8_DYNAMIC or "
            "W8A8, which have a scale for each result"
        )
    return frozenset(found)


def _matrices(config: TransformerConfig, names: Callable[[BlockConfig], Names]):
    """(name with {layer} and {expert}, what of ours is in it) of all tensors with projections in them."""
    one = MeshSpec()
    with jax.sharding.use_abstract_mesh(one.abstract()):
        params = parameters(config, Rules.make("zero3", one).fitting(config.widths()))
    shapes = {path: jax.ShapeDtypeStruct(param.shape, param.dtype) for path, param in params.items()}
    named = weights.leaves(config, unflatten_dict(shapes), names)
    flat = [shapes[leaf.path] for leaf in named]
    for group in weights.by_tensor(named, flat).values():
        both = [(leaf, params[leaf.path]) for leaf, _ in group]
        if any(param.get_metadata("projection", False) for _, param in both):
            yield both[0][0].tensor.name, both


def _refused(tensors: Sequence[Tensor], params: Sequence[nnx.Param], trained: bool) -> str:
    """Why a tensor is not written in few bits."""
    for tensor, param in zip(tensors, params, strict=True):
        names, into = param.get_metadata("names"), param.get_metadata("into")
        if not into or tensor.pieces:
            return "holds other weights too"
        if trained and not param.get_metadata("projection", False):
            return "holds weights too that training does not round"
        shape = param.shape[-len(names) :]
        if tensor.per_expert():
            tensor, shape, into = weights.without_experts(tensor), shape[1:], into - 1
        theirs, ours = tensor.theirs(tensor.viewed(shape)), tensor.letters(shape)
        if len(theirs) != 2:
            return "has the experts of a layer in one"
        if theirs[1] != ours[:into] or (tensor.part and tensor.part[0] == 1):
            return "has its inputs in another order"
        if trained and not tensor.name.endswith(written.WEIGHT):
            return "is no module's weight, which is left in 16 bits"
    return ""
