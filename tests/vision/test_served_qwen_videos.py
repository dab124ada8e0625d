"""Videos in prompts of Qwen's models, as an engine reads them, against transformers."""

import pytest
from films import film
from qwen_checkpoints import IMAGE, VIDEO, folder_of, inputs
from seeing import noise
from served import SIZES, Family, asked, held_to_transformers, replies

from shardlm import LLM
from shardlm.mesh import MeshSpec

pytest.importorskip("transformers", reason="what transformers made is in references/")

LONG, SHORT = (film(6, 24, 40), 1.5), (film(3, 32, 24, 1), 24.0)
ASKS = [
    ([1, 20, 92, VIDEO, 93, 21, 22], [], [LONG]),
    ([92, IMAGE, 93, 23, 92, VIDEO, 93, 5, 6, 92, VIDEO, 93, 7], [noise(24, 24, 1)], [SHORT, LONG]),
    ([7, 8, 9], [], []),
    ([1, 92, VIDEO, 93, 4, 92, IMAGE, 93, 8], [noise(40, 64)], [(LONG[0], 3.0)]),
]
KINDS = ("exaone4_5", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@pytest.mark.wide
@pytest.mark.parametrize("kind", [pytest.param(kind, id=f"{kind}-video") for kind in KINDS])
def test_replies_are_those_of_transformers(kind, tmp_path):
    """All at once; once more, when what they begin with is in pages; and of one on a mesh."""
    family = Family(*folder_of(kind, tmp_path), inputs)
    llm = LLM(family.folder, **SIZES)
    held_to_transformers(family, llm, ASKS)
    again = asked(llm, ASKS)
    assert again[0].num_cached_tokens or kind.startswith("qwen3_5")
    if kind == "qwen2_5_vl":
        assert replies(again) == replies(asked(LLM(family.folder, mesh=MeshSpec(tensor=2), **SIZES), ASKS))
