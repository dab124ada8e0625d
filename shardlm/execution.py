"""How a model that is opened runs: the dtype it computes in, what its weights are held in, and the kernels for its
devices."""

import collections
import pathlib
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from shardlm.errors import ShardlmError
from shardlm.hardware import multiplies_fp8
from shardlm.hf_files import Folder, Stored, holds_weights
from shardlm.hf_quantised import supported
from shardlm.layers.lora import LoraConfig
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops import attention, grouped_matmul, grouped_weights, paged_attention
from shardlm.ops.weight_format import DYNAMIC, PUBLISHED, AsPublished, WeightFormat
from shardlm.published_weights import as_published, frozen_as_published, kinds_in, not_published, takes_no
from shardlm.rules import Rules
from shardlm.serving_rules import serving_rules

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def stored_dtype(source: Pretrained) -> str:
    """The dtype that a Hugging Face checkpoint says its weights are in; where it does not, as older ones, that of most
    of them, or float32 where they are not here."""
    said = registry.text_config(source.options)
    return said.get("dtype") or said.get("torch_dtype") or _dtype_of_files(pathlib.Path(source.folder)) or "float32"


def _dtype_of_files(folder: pathlib.Path) -> str:
    sizes = collections.Counter()
    for tensor in Folder.open(folder).tensors.values() if holds_weights(folder) else ():
        if isinstance(tensor, Stored) and tensor.dtype.name in DTYPES:
            sizes[tensor.dtype.name] += tensor.nbytes
    return max(sizes, key=sizes.get, default="")


def weight_format_of(
    source: Any,
    lora: LoraConfig,
    run: bool,
    asked: str | AsPublished | None,
    shape: TransformerConfig,
    spec: MeshSpec,
    served: Mesh | None,
) -> WeightFormat:
    """What projections are held in, of a model that is `served` on a mesh or not, and whose weights are a run's or not.
    Not asked for, weights in few bits are served as their file has them."""
    if lora.base == PUBLISHED:
        rules = serving_rules(shape, spec) if served else Rules.make("zero3", spec).fitting(shape.widths())
        return frozen_as_published(source, shape, rules)
    if lora.rank:
        return lora.base
    if run and isinstance(asked, AsPublished):
        raise takes_no("a run has")
    if asked not in (None, PUBLISHED):
        return asked
    of_file = isinstance(source, Pretrained) and not run  # a run from such weights has its own, in full
    method = supported(source.options) if of_file else ""
    if asked is None and (not method or served is None):
        return "dtype"
    rules = serving_rules(shape, spec)
    kinds = kinds_in(Folder.open(source.folder), shape, rules) if method else {}
    kept = as_published(kinds, rules)
    if kept.kinds:
        return kept
    if asked is None:
        return "dtype"
    why = f"its weights, in few bits ({method}), are of a kind that is served in more" if method else "it has no such"
    if cut := [name for name, kind in kinds.items() if kind.alike]:
        why = f"{', '.join(cut)} are in groups that the mesh {spec} cannot split"
    raise not_published(why)


def execution_of(
    shape: TransformerConfig,
    rules: Rules,
    name: str,
    device: Any,
    held: WeightFormat,
    lora: LoraConfig,
) -> Execution:
    """How a model that is opened runs in the dtype of this name on devices like this one. Raises ShardlmError for
    another dtype, for 8-bit products that it or the GPU does not have, and for experts on GPUs without the package of
    their kernels."""
    if name not in DTYPES:
        raise ShardlmError(f"dtype={name!r}; choose from {', '.join(DTYPES)}")
    if held in DYNAMIC and name == "float16":
        raise ShardlmError(
            f"quantization={held} with dtype=float16: sums of 8-bit products are scaled afterwards and before that "
            "exceed float16, which ends at 65,504; set dtype to bfloat16"
        )
    if held == "fp8_dynamic" and device.platform != "cpu" and not multiplies_fp8(device):
        raise ShardlmError(
            f"quantization=fp8_dynamic on {device.device_kind}: its matrix units do not take fp8, which came with "
            "compute capability 8.9 (Ada, Hopper, Blackwell); choose int8_dynamic, or fp8 for weights alone"
        )
    heads = {(a.head_dim, a.value_dim) for a in shape.attention_kinds}
    capped = any(a.softcap for a in shape.attention_kinds)
    experts = any(block.mlp.num_experts for block in shape.all_blocks())
    return Execution(
        rules,
        DTYPES[name],
        attention=attention.choose("auto", device, DTYPES[name], heads, capped, trained=False),
        grouped_matmul=grouped_matmul.choose(device.platform) if experts else "blocked",
        lora=lora,
        weights=held,
        paged_attention=paged_attention.choose(device.platform),
        few_bits=grouped_weights.choose(device.platform),
    )
