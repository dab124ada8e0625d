"""What the class that users call refuses before weights are read and programs compiled: options, sizes, files."""

import shutil

import pytest
from engines import folder_of

import shardlm
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.build import build
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.options import config_of

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("refused") / "model")


def test_options_that_are_not_known(folder, caplog):
    for options, message in (
        ({"gpu_memory_utilisation": 0.5}, "no option gpu_memory_utilisation=0.5; did you mean gpu_memory_utilization"),
        ({"xyz": 1}, "no option xyz=1; there are dtype, quantization, "),
        ({"task": "embed"}, "no option task='embed'; any model generates and embeds"),
        ({"max_logprobs": 50}, "no option max_logprobs=50; up to 20 alternatives"),
        ({"hf_overrides": {}}, "no option hf_overrides={}; change config.json"),
    ):
        with pytest.raises(ShardlmError, match=message):
            shardlm.LLM(folder, **options)
    config = config_of(MeshSpec(), None, {"dtype": "auto", "enforce_eager": True, "block_size": 4})
    assert config == EngineConfig(block_size=4) and "enforce_eager=True is vLLM's" in caplog.text


def test_what_cannot_be_built_is_refused(folder):
    for options, message in (
        (
            {"quantization": "awq"},
            "what a checkpoint says of itself, and is read without it: leave it out",
        ),
        ({"quantization": "int3"}, "choose from int8, int4, fp8, int8_dynamic, fp8_dynamic"),
        ({"mesh": MeshSpec(fsdp=2)}, "give its devices to tensor, expert, pipeline or data"),
        ({"mesh": MeshSpec(pipeline=4)}, "pipeline=4 stages of 3 layers; choose at most 3"),
        ({"mesh": MeshSpec(data=3, tensor=4)}, "needs 12 devices and there are 8"),
        ({"max_model_len": 128}, "more than the model's 64 positions"),
        ({"kv_cache_bytes": 100}, "hold no page"),
        ({"kv_cache_bytes": 10_000}, "needs 16 pages of 4, and the pool has"),
        ({"gpu_memory_utilization": 1.5}, "is a share above 0.05"),
        ({"block_size": 0}, "block_size=0 must be an integer of at least 1"),
        ({"max_model_len": 0}, "max_model_len=0 must be"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens=-5 must be"),
        ({"kv_cache_bytes": 1e9}, "kv_cache_bytes=1000000000.0 must be an integer"),
    ):
        with pytest.raises(ShardlmError, match=message):
            build(folder, EngineConfig(**(SIZES | options)))
    with pytest.raises(ShardlmError, match="give mesh or the sizes, not both"):
        shardlm.LLM(folder, mesh=MeshSpec(), tensor_parallel_size=2)


def test_what_the_files_beside_weights_say_is_refused_before_weights_are_read(folder, tmp_path):
    folder = shutil.copytree(folder, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ShardlmError, match="reasoning_parser='qwen' must be one of auto"):
        shardlm.LLM(folder, reasoning_parser="qwen")
    for nbytes, message in ((100, "hold no page"), (10_000, "needs 16 pages of 4, and the pool has")):
        with pytest.raises(ShardlmError, match=message):
            build(folder, EngineConfig(**(SIZES | {"kv_cache_bytes": nbytes})))
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ShardlmError, match="temperature='hot' must be a number"):
        shardlm.LLM(folder)
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    for served in (shardlm.LLM, AsyncLLM.from_model):
        with pytest.raises(ShardlmError, match=r"chat_template.jinja, line 2: unexpected '}'"):
            served(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{% for')  # none was said to be there
    for served in (shardlm.LLM, AsyncLLM.from_model):
        with pytest.raises(ShardlmError, match=r"tokenizer_config.json is not JSON .*download it again"):
            served(folder)
