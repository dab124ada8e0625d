"""The transformers side of the comparison of encoders of images: writes a small random checkpoint that sees into a
folder that has none, and takes the quickest of a few calls of its encoder and projector on one image of 448 x 448
pixels, 1,024 patches, on the CPU in float32. Prints one JSON line. Needs torch and transformers.

python benchmarks/peers/transformers_images.py --eyes=gemma3 --folder=FOLDER --threads=2
"""

import argparse
import json
import pathlib
import time

import torch
import transformers

SIDE, PATCH, WIDTH = 448, 14, 768
TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
GEMMA3 = {
    "hidden_size": WIDTH,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": SIDE,
    "patch_size": PATCH,
}
QWEN = {
    "depth": 12,
    "hidden_size": WIDTH,
    "intermediate_size": 2048,
    "num_heads": 12,
    "out_hidden_size": TEXT["hidden_size"],
    "window_size": 112,
    "fullatt_block_indexes": [2, 5, 8, 11],
}


def made(eyes: str):
    """(model, what its folder says of preparing images, what its encoder is called with)."""
    patches = (SIDE // PATCH) ** 2
    if eyes == "gemma3":
        config = transformers.Gemma3Config(text_config=TEXT, vision_config=GEMMA3, mm_tokens_per_image=patches // 16)
        model = transformers.Gemma3ForConditionalGeneration(config)
        given = {"pixel_values": torch.randn(1, 3, SIDE, SIDE)}
        return model, {"size": {"height": SIDE, "width": SIDE}}, given
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=QWEN, image_token_id=300)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]])
    given = {"pixel_values": torch.randn(patches, 2 * 3 * PATCH**2), "image_grid_thw": grid}
    preparation = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    return model, preparation | {"min_pixels": 4 * PATCH**2, "max_pixels": SIDE**2}, given


def write(model, preparation: dict, folder: pathlib.Path) -> None:
    model.save_pretrained(folder)
    lines = [{"content": "\n" * many, "id": 300 + many} for many in (1, 2, 3, 4)]
    files = {"preprocessor_config": preparation, "tokenizer": {"added_tokens": lines}}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--eyes", choices=["gemma3", "qwen2_5_vl"], required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model, preparation, given = made(args.eyes)
    model = model.eval()
    if not (args.folder / "config.json").exists():
        write(model, preparation, args.folder)
    seconds = []
    for _ in range(args.calls + 1):
        started = time.perf_counter()
        model.model.get_image_features(**given)
        seconds.append(time.perf_counter() - started)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"seconds": min(seconds[1:]), "versions": versions}))


if __name__ == "__main__":
    main()
