"""Models served from pages whose positions are split over devices, against what transformers recorded: replies, scores,
cached beginnings, with what else an engine has; what cannot be split so is refused."""

import pytest
from test_families_served import check

from shardlm.mesh import MeshSpec

FOUR, TENSOR = MeshSpec(expert=2, tensor=2), MeshSpec(tensor=2)
STAGES = MeshSpec(pipeline=2, tensor=2)
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
CASES = {
    "latents": ("deepseek_v3", FOUR, 4, {"max_num_batched_tokens": 24}),
    "one head of keys": ("falcon", TENSOR, 2, {"max_num_batched_tokens": 24}),
}
MORE = {
    "latents over one axis": ("deepseek_v2", FOUR, 2, {"max_num_batched_tokens": 24}),
    "beside linear attention": ("kimi_linear", TENSOR, 2, {}),
    "stages": ("deepseek_v3", STAGES, 2, {"kv_offloading_size": 0.001}),
    "replicas": ("deepseek_v3", MeshSpec(data=2, tensor=2), 2, {}),
    "drafts": ("deepseek_v3", TENSOR, 2, DRAFTS),
    "deterministic": ("deepseek_v3", TENSOR, 2, {"deterministic": True}),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.wide) for name in MORE)]
)  # 8 s of a core each
def test_replies_from_split_pages_are_those_recorded(name, tmp_path):
    family, spec, ways, options = (CASES | MORE)[name]
    check(family, spec, tmp_path / family, decode_context_parallel_size=ways, **options)
