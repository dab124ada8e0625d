"""Images over pipeline stages: the first reads them, positions on three axes and what tokens see of an image go to
each, and vectors of deeper layers are handed on. Programs are started as on GPUs, on threads of their own."""

import jax
import pytest
import references
from rolled import rolled
from served import SIZES, asked, held_to_references, replies

from shardlm import LLM
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.memory import serving_memory
from shardlm.serve import runner, staged_runner
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.launcher import Launcher

DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
MEMORY = "qwen3_5"  # linear attention, then attention
TWO = MeshSpec(pipeline=2)


@pytest.fixture(scope="module", autouse=True)
def as_on_gpus():
    with pytest.MonkeyPatch.context() as patch:
        for module in (runner, staged_runner):
            patch.setattr(module, "launcher_on", lambda platform: Launcher(threaded=True))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("staged")
    return {name: references.folder(name, home) for name in ("qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", MEMORY)}


@pytest.mark.wide
@pytest.mark.parametrize(
    "name, mesh, options",
    [
        ("qwen2_5_vl", TWO, {}),
        ("qwen3_vl", TWO, {}),  # of two layers, both of which add vectors of their own
        ("gemma3", TWO, {}),
        ("gemma3", MeshSpec(pipeline=3), {"max_num_batched_tokens": 17, "max_num_seqs": 1}),
        ("qwen3_vl", TWO, {"speculative_config": DRAFTS}),
        ("gemma3", TWO, {"speculative_config": DRAFTS}),
        ("qwen2_5_vl", TWO, {"deterministic": True}),
        ("qwen3_vl", TWO, {"deterministic": True}),
        ("mistral3", MeshSpec(pipeline=2, tensor=2), {}),
        ("qwen3_vl", MeshSpec(pipeline=2, data=2), {}),
        ("qwen3_vl", MeshSpec(pipeline=2, tensor=2), {}),
        (MEMORY, TWO, {}),
    ],
    ids=str,
)
def test_replies_are_those_of_one_device(folders, name, mesh, options):
    """Which are transformers'. Once more, when what prompts begin with is in pages."""
    llm, asks = LLM(folders[name], mesh=mesh, **SIZES | options), references.asks(name)
    held_to_references(name, llm)
    said = [one["reply"] for one in references.said(name)]
    for _ in range(2):
        again = asked(llm, asks, len(said[0]))
        assert replies(again) == said
    assert name == MEMORY or again[1].num_cached_tokens > 8


@pytest.mark.wide
def test_who_is_preempted_reads_its_images_again(folders):
    asks = references.asks("qwen3_vl")
    own = SIZES | {"enable_prefix_caching": False}
    expected = replies(asked(LLM(folders["qwen3_vl"], **own), asks * 3, count=24))
    tight = LLM(folders["qwen3_vl"], mesh=TWO, **own, kv_cache_bytes=70 * 1024)
    assert replies(asked(tight, asks * 3, count=24)) == expected
    assert tight.engine.scheduler.preemptions > 0


@pytest.mark.wide
def test_new_weights(folders, tmp_path):
    """Of the encoder in the first stage, and of all stages."""
    asks = references.asks("mistral3")
    other = rolled(folders["mistral3"], tmp_path / "other", "vision_tower", "language_model")
    expected = replies(asked(LLM(other, **SIZES), asks))
    llm = LLM(folders["mistral3"], mesh=TWO, **SIZES)
    held_to_references("mistral3", llm)
    llm.update_weights(other)
    assert replies(asked(llm, asks)) == expected
    llm.update_weights(folders["mistral3"])
    held_to_references("mistral3", llm)


def test_plans_have_the_encoder_in_the_first_stage(folders):
    """As the engine has it, with the vectors."""
    folder, own = folders["qwen3_vl"], {"dtype": "float32", "kv_cache_bytes": 2**18, **SIZES}
    config = EngineConfig(mesh=TWO, **own)
    served, cluster = ServedModel.of_folder(folder, SIZES["max_model_len"]), Cluster.of(GPUS["h100"], 2)
    case = ServingCase(served, cluster, config, 20, 9)
    first, last = serving_memory(case).stages
    runner = LLM(folder, mesh=TWO, **own).engine.runner
    assert (first.encoder, last.encoder) == (runner.image_encoder.encoder.bytes, 0)
    assert first.slots == runner._state[0].vectors.nbytes and runner._state[1].vectors is None
    parts = [sum(a.nbytes for a in jax.tree.leaves(part)) for part in runner._parts]
    assert [first.weights - first.encoder, last.weights] == parts
