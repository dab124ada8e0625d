"""The program that puts one of several adapters into its part, compiled for H100s without one: it writes that part in
place and nothing else, and no GPU asks another. Every figure is read from the program (compiled)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import MARKS
from jax.sharding import NamedSharding

from shardlm.hlo.text import parse
from shardlm.layers.lora import LoraConfig
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.serve.adapter_parts import shape_of_part, write_part
from shardlm.serve.layers import apart
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef, adapters_of
from shardlm.topology import topology

pytestmark = MARKS
LLAMA = dataclasses.replace(LlamaConfig(), num_layers=3, vocab_size=32_768)
MANY, RANK = 4, 16


def bytes_of(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.parametrize("tensor", [1, 4])
def test_one_adapter_is_written_in_place(tensor):
    spec = MeshSpec(tensor=tensor)
    mesh = spec.build(topology("h100", 1, tensor))
    with jax.set_mesh(mesh):
        shape = apart(LLAMA.transformer())
        lora = LoraConfig(MANY * RANK)
        execution = Execution(serving_rules(shape, spec, "dtype"), jnp.bfloat16, lora=lora, adapters=MANY)
        every = adapters_of(ModelDef.make(shape, execution).held_at_rest(mesh))
        part = shape_of_part(every, execution)
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, jax.P()))
        write = jax.jit(functools.partial(write_part, RANK), donate_argnums=1)
        compiled = write.lower(part, every, number).compile()
    assert bytes_of(every) == MANY * bytes_of(part)
    memory, module = compiled.memory_analysis(), parse(compiled.as_text())
    assert memory.alias_size_in_bytes == memory.output_size_in_bytes - 8 * len(jax.tree.leaves(every))
    assert memory.temp_size_in_bytes == 0
    kernels = [at.opcode for at in module.computations[module.entry].instructions if at.opcode == "fusion"]
    assert len(kernels) <= len(jax.tree.leaves(every))
