"""Kimi K2.5 and Llama 4 with images as an engine reads them."""

import pytest
import test_kimi
import test_llama4
from seeing import noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

FIRST, SECOND = noise(20, 40), noise(60, 10, 1)
SIZES |= {"max_num_batched_tokens": 96}


def kimi():
    config = transformers.Kimi_K25Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "pos_emb_height": 6, "pos_emb_width": 6,
        },
        text_config={
            "model_type": "deepseek_v3", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2, "vocab_size": 64,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "tie_word_embeddings": False,
        },
        projection_hidden_size=32, image_token_id=test_kimi.TOKEN, tie_word_embeddings=False,
    )  # fmt: skip

    def images(given, ids):
        if not given:
            return {}
        made = [test_kimi.processed(image) for image in given]
        grids = torch.tensor([[1, *grid] for _, grid in made])
        return {"pixel_values": torch.cat([patches for patches, _ in made]), "image_grid_thw": grids}

    model = transformers.AutoModelForImageTextToText.from_config(config)
    return model, test_kimi.TOKEN, {"<image>": test_kimi.TOKEN}, test_kimi.PREPARED, images


class ByItsParts(torch.nn.Module):
    """Llama 4, whose own forward fails in transformers 5.24 (its text's output has no image_outputs)."""

    def __init__(self, model):
        super().__init__()
        self.model, self.save_pretrained = model, model.save_pretrained

    def forward(self, input_ids, pixel_values=None):
        x = self.model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            vectors = self.model.multi_modal_projector(self.model.get_image_features(pixel_values).last_hidden_state)
            at = (input_ids == test_llama4.PATCH)[..., None]
            x = x.masked_scatter(at, vectors.reshape(-1, x.shape[-1]))
        return self.model.language_model(inputs_embeds=x)


def llama4():
    config = transformers.Llama4Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 16, "vision_output_dim": 24, "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
        text_config={
            "hidden_size": 40, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
            "num_local_experts": 2, "num_experts_per_tok": 1, "moe_layers": [], "attention_chunk_size": 32,
        },
        image_token_index=test_llama4.PATCH, tie_word_embeddings=False,
    )  # fmt: skip

    def images(given, ids):
        return (
            {"pixel_values": torch.cat([test_llama4.processed(image)[0].float() for image in given])} if given else {}
        )

    tokens = test_llama4.TOKENS
    model = transformers.Llama4ForConditionalGeneration(config)
    return (
        ByItsParts(model),
        tokens["<|image|>"],
        tokens | {"<|patch|>": test_llama4.PATCH},
        test_llama4.PREPARED,
        images,
    )


@pytest.mark.wide
@pytest.mark.parametrize("made", [kimi, llama4])
def test_replies_are_those_of_transformers(made, tmp_path):
    model, token, tokens, prepared, images = made()
    folder = written(drawn(model), tmp_path, tokens, preprocessor_config=prepared)
    with_tokenizer(folder, 64, tokens)
    asks = [([2, 5, token, 6, 7], [FIRST]), ([2, 8, token, 9, token, 16, 17], [SECOND, FIRST]), ([2, 40, 41, 42], [])]
    llm = LLM(folder, **SIZES)
    held_to_transformers(Family(folder, model, images), llm, asks)
    found = replies(asked(llm, asks))
    again = asked(llm, asks)
    assert replies(again) == found and again[1].num_cached_tokens > 8
