"""XLA's options that some of an engine's programs have of their own."""

import jax
import jax.numpy as jnp
import pytest

from shardlm.serve.chunk_programs import WHILE_WEIGHTS_ARE_READ
from shardlm.serve.compiling import APART, NO_GRAPHS, options_of

MANY = WHILE_WEIGHTS_ARE_READ["gpu"]


@pytest.mark.parametrize(
    ("platform", "key", "expected"),
    [
        ("gpu", ("chunk", (1, MANY // 2)), NO_GRAPHS),
        ("gpu", ("chunk", (2, MANY // 2)), NO_GRAPHS | APART),
        ("gpu", ("whole", (1, MANY)), NO_GRAPHS | APART),
        ("gpu", ("decode", 4), {}),
        ("gpu", "begin", {}),
        ("cpu", ("whole", (1, MANY)), {}),
    ],
)
def test_prompts_run_without_graphs_and_long_ones_with_products_apart(platform, key, expected):
    assert options_of(platform, key) == expected


def test_this_jaxlib_knows_them():
    """It reads options of GPUs wherever it compiles, and refuses what it does not know."""
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    assert lowered.compile(compiler_options=NO_GRAPHS | APART)(jnp.ones(3))[0] == 2
    for wrong in ({"xla_gpu_enable_command_buffer": "NONE"}, {"xla_gpu_no_such_option": 1}):
        with pytest.raises(Exception, match=next(iter(wrong))):
            lowered.compile(compiler_options=wrong)
