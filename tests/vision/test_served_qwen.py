"""Images in prompts of Qwen's models: positions on three axes, DeepStack, linear attention; against transformers."""

import pytest
from qwen_checkpoints import FAMILIES, IMAGE, folder_of, inputs
from seeing import noise
from served import SIZES, Family, asked, held_to_transformers, replies

from shardlm import LLM
from shardlm.mesh import MeshSpec

pytest.importorskip("transformers", reason="what transformers made is in references/")

FIRST, SECOND, THIRD = noise(40, 64), noise(24, 24, 1), noise(90, 21, 2)
ASKS = [
    ([1, 20, 92, IMAGE, 93, 21, 22], [FIRST]),
    ([92, IMAGE, 93, 23, 92, IMAGE, 93, 5, 6, 92, IMAGE, 93, 7], [SECOND, THIRD, FIRST]),
    ([1, 20, 92, IMAGE, 93, 21, 33], [FIRST]),
    ([7, 8, 9], []),
]
MESHED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
PLAIN, WIDE = ("qwen2_5_vl", "qwen3_vl"), pytest.mark.wide  # windows and axes; DeepStack


@pytest.mark.parametrize("kind", [kind if kind in PLAIN else pytest.param(kind, marks=WIDE) for kind in FAMILIES])
def test_replies_are_those_of_transformers(kind, tmp_path):
    """All at once; once more, when what they begin with is in pages (which linear attention does not have); and of some
    on a mesh."""
    family = Family(*folder_of(kind, tmp_path), inputs)
    llm = LLM(family.folder, **SIZES)
    held_to_transformers(family, llm, ASKS)
    again = asked(llm, ASKS)
    assert again[0].num_cached_tokens or kind.startswith("qwen3_5")
    if kind in MESHED:
        assert replies(again) == replies(asked(LLM(family.folder, mesh=MeshSpec(tensor=2), **SIZES), ASKS))
