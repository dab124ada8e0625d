"""Kimi K2.5's eyes against transformers."""

import json
import math

import numpy as np
import pytest
from PIL import Image
from seeing import Eyes, close, lively, noise, written

from shardlm.hf_files import Folder
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN = 60
PREPARED = {"max_patches": 64, "size": {"max_height": 12, "max_width": 12}}
SIZES = [(24, 24), (40, 30), (300, 170), (9, 90), (3, 3)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Kimi_K25Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "pos_emb_height": 6, "pos_emb_width": 6,
        },
        text_config={
            "model_type": "deepseek_v3", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "vocab_size": 64,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "n_routed_experts": 4,
        },
        projection_hidden_size=32, image_token_id=TOKEN,
    )  # fmt: skip
    found = transformers.AutoModelForImageTextToText.from_config(config).eval()
    return lively(found)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return written(model, tmp_path_factory.mktemp("kimi"), {}, preprocessor_config=PREPARED)


@pytest.fixture(scope="module")
def eyes(folder):
    return Eyes(folder)


def processed(image: np.ndarray):
    """(patches [P, 3, 4, 4], grid) as image_processing_kimi_k25.py has it, whose class needs torchvision."""
    height, width = image.shape[:2]
    count = max(1.0, height // 4) * max(1.0, width // 4)
    scale = min(1.0, math.sqrt(64 / count), 48 / height, 48 / width)
    new = [min(max(1, int(each * scale)), 48) for each in (height, width)]
    resized = np.asarray(Image.fromarray(image).resize(new[::-1], Image.Resampling.BICUBIC))
    pad = [(8 - each % 8) % 8 for each in new]
    pixels = (np.pad(resized, [(0, pad[0]), (0, pad[1]), (0, 0)]) / 255 - 0.5) / 0.5
    rows, columns = pixels.shape[0] // 4, pixels.shape[1] // 4
    cut = torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1).reshape(3, rows, 4, columns, 4)
    return cut.permute(1, 3, 0, 2, 4).reshape(-1, 3, 4, 4), (rows, columns)


@pytest.mark.parametrize("height, width", SIZES)
@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model, height, width):
    image = noise(height, width)
    expected, (rows, columns) = processed(image)
    picture = eyes.sight.prepare(image)
    assert picture.grid == (rows // 2, columns // 2) and picture.patches <= eyes.sight.sizes[-1]
    order = picture.inputs["rows"] * columns + picture.inputs["columns"]
    found = picture.inputs["pixels"].transpose(0, 3, 1, 2)
    np.testing.assert_allclose(found, expected.numpy()[order], atol=1 / 255)
    grid = torch.tensor([[1, rows, columns]])
    close(eyes.vectors(picture), model.model.get_image_features(expected, grid).pooler_output[0].numpy())


def test_tokens(eyes):
    assert eyes.sight.tokens(eyes.sight.prepare(noise(24, 30))) == [TOKEN] * 12
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.merged) == (TOKEN, TOKEN, 4)


def test_moonshots_own_names(folder, eyes, model, tmp_path):
    """Of options, which its own files call otherwise."""
    config = json.loads((folder / "config.json").read_text())
    own = config["vision_config"]
    renamed = {
        "vt_hidden_size": own["hidden_size"], "vt_intermediate_size": own["intermediate_size"],
        "vt_num_hidden_layers": own["num_hidden_layers"], "vt_num_attention_heads": own["num_attention_heads"],
        "init_pos_emb_height": 6, "init_pos_emb_width": 6, "init_pos_emb_time": 4, "patch_size": 4,
        "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger",
        "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
        "text_hidden_size": 40, "mm_hidden_size": 32, "video_attn_type": "spatial_temporal",
    }  # fmt: skip
    config |= {"vision_config": renamed, "media_placeholder_token_id": TOKEN}
    del config["image_token_id"], config["projection_layer_norm_eps"]
    limits = {"in_patch_limit": 64, "patch_limit_on_one_side": 12, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    own = written(model, tmp_path, {}, preprocessor_config={"media_proc_cfg": limits})
    (own / "config.json").write_text(json.dumps(config))
    sight = sight_of(own, Folder.open(own).config)
    assert sight.encoder == eyes.sight.encoder and sight.prepare == eyes.sight.prepare
    assert (sight.token, sight.sizes) == (TOKEN, eyes.sight.sizes)
