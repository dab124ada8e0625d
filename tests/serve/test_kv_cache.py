"""Caches of fewer bits, through the engine: how far log-probabilities are from those of `transformers`, and how many
more pages the same memory holds."""

import pathlib

import jax
import numpy as np
import pytest
from engines import TOKENIZER, finished

from shardlm import hf_files
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.opened import load
from shardlm.ops.kv_format import held
from shardlm.serve.build import assemble, described
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.pool_size import page_bytes
from shardlm.serve.sampling_params import SamplingParams

REFERENCES = pathlib.Path(__file__).parent.parent / "hf" / "references"
MEMORY = 2**16


# Pages of 4 tokens in MEMORY, and the largest difference that was measured, in nats. In float32 they
# are 42 and 56. Latents are whole on each device of tensor, so that over two of them a page takes twice as much.
@pytest.mark.parametrize(
    ("family", "how", "tensor", "pages", "measured"),
    [
        ("llama", "bfloat16", 2, 85, 0.0044),
        pytest.param("deepseek_v2", "bfloat16", 1, 113, 0.0074, marks=pytest.mark.wide),
        ("llama", "int8", 2, 113, 0.020),
        ("deepseek_v2", "fp8", 1, 227, 0.43),
        pytest.param("deepseek_v2", "int8", 2, 97, 0.026, marks=pytest.mark.wide),
    ],
)
def test_log_probabilities_and_pages(family, how, tensor, pages, measured):
    reference = hf_files.header(REFERENCES / family / "expected.safetensors.reference")
    tokens, logits = (reference[name].read(...)[0] for name in ("tokens", "logits"))
    mesh = MeshSpec(tensor=tensor)
    opened = load(REFERENCES / family, mesh=mesh, dtype="float32", decoding=True, length=56)
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "block_size": 4}
    config = EngineConfig(mesh=mesh, kv_cache_dtype=how, kv_cache_bytes=MEMORY, **sizes)
    engine = assemble(opened, TOKENIZER, [], 60, config)
    model, layout = engine.runner.model, engine.runner.config.layout
    assert MEMORY // page_bytes(model, layout, 4) == pages
    pools = jax.tree.leaves(engine.runner._state.pages)
    held_bytes = sum(shard.data.nbytes for pool in pools for shard in pool.addressable_shards)
    assert page_bytes(model, layout, 4) * layout.num_pages == held_bytes
    room = (layout.num_pages - 1) * 4  # tokens
    said = f"keys and values of {room} tokens in {how}, for {room / 60:.1f} requests of 60 tokens"
    assert f"{said}, all that can be used, so that 6.10352e-05 GiB (kv_cache_gib) are not" in described(
        engine, "a", config
    )
    assert f"{said}; 1 requests at once" in described(engine, "a", EngineConfig(**sizes))
    engine.add("a", tokens.tolist(), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0))
    output = finished(engine)["a"]
    found = np.array([one.chosen.logprob for one in output.prompt_logprobs[1:]])
    expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens) - 1), tokens[1:]]
    assert 1e-4 < np.abs(found - expected).max() < 1.5 * measured
    assert len(output.outputs[0].token_ids) == 8


def test_what_cannot_be_held_is_refused():
    with pytest.raises(ShardlmError, match="kv_cache_dtype='int4'; choose from auto, bfloat16, fp8, int8"):
        EngineConfig(kv_cache_dtype="int4")
    assert EngineConfig(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"  # vLLM's other name
    with pytest.raises(ShardlmError, match="heads of 7 numbers are not in pairs; choose auto"):
        held({"k": ((2, 7), "kv_heads")}, "fp8", np.float32, "blocked")
