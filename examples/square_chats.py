"""Makes what configs/sft_images.py trains, downloading nothing: a small random model that sees, pictures of a coloured
square in a corner, and conversations about them, as chat JSONL:

    python examples/square_chats.py data/squares

makes data/squares/model, a Qwen2.5-VL of 0.2M parameters, data/squares/images/, and data/squares/train.jsonl and
validation.jsonl, whose paths of images are relative to them.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from PIL import Image

from shardlm import weights
from shardlm.hf_files import Planned, write_folder
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.opened import prepare
from shardlm.tokenizer import train_bpe
from shardlm.vision.encoder import Encoder
from shardlm.vision.registry import sight_of
from shardlm.vision.tower_weights import needed

SIDE, WIDTH = 64, 64  # pixels of an image's side; of the model's stream
COLOURS = {
    "red": (220, 30, 30),
    "green": (20, 160, 40),
    "blue": (40, 60, 220),
    "yellow": (240, 220, 40),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
}
CORNERS = ("top left", "top right", "bottom left", "bottom right")
QUESTION = "What is in the picture?"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if c.type == 'image' else c.text }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPARATION = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 16_384}


def picture(rng: np.random.Generator, colour: str, corner: str) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3]: a square somewhere in a quarter of a grey ground with noise."""
    pixels = np.full((SIDE, SIDE, 3), rng.integers(110, 150))
    row, column = ("bottom" in corner) * SIDE // 2, ("right" in corner) * SIDE // 2
    top, left = rng.integers(0, 9, 2)
    pixels[row + top : row + top + 24, column + left : column + left + 24] = COLOURS[colour]
    return np.clip(pixels + rng.integers(-12, 13, pixels.shape), 0, 255).astype(np.uint8)


def conversations(folder: pathlib.Path, name: str, count: int, seed: int):
    """So many, whose pictures are written beside."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        colour, corner = str(rng.choice(list(COLOURS))), str(rng.choice(CORNERS))
        file = f"images/{name}_{number:04d}.png"
        Image.fromarray(picture(rng, colour, corner)).save(folder / file)
        asked = [{"type": "image", "image": file}, {"type": "text", "text": QUESTION}]
        answer = f"A {colour} square at the {corner}."
        yield {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def config_of(tokens: dict[str, int], vocab_size: int) -> dict:
    """config.json."""
    text = {"vocab_size": vocab_size, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    text |= {"max_position_embeddings": 1024, "rope_theta": 10_000.0, "eos_token_id": tokens["<|im_end|>"]}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "model_type": "qwen2_5_vl_text"}
    seeing = {"depth": 2, "hidden_size": WIDTH, "num_heads": 4, "intermediate_size": 2 * WIDTH, "hidden_act": "silu"}
    seeing |= {"out_hidden_size": WIDTH, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    seeing |= {"window_size": 32, "fullatt_block_indexes": [1], "in_channels": 3}
    ids = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"}
    ids |= {"vision_end_token_id": "<|vision_end|>"}
    own = {name: tokens[token] for name, token in ids.items()} | {"tie_word_embeddings": False, "dtype": "float32"}
    whole = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], **own}
    return {**whole, "text_config": text, "vision_config": seeing}


def write_model(folder: pathlib.Path, seed: int = 0) -> None:
    """The model's folder, of random weights."""
    folder.mkdir(parents=True)
    words = [f"{QUESTION} A {colour} square at the {corner}." for colour in COLOURS for corner in CORNERS]
    tokenizer = train_bpe([*words, "user assistant"], 320, SPECIAL)
    config = config_of(tokenizer.vocabulary, tokenizer.vocab_size)
    files = {"config": config, "preprocessor_config": PREPARATION | {"image_processor_type": "Qwen2VLImageProcessor"}}
    files |= {"generation_config": {"eos_token_id": tokenizer.vocabulary["<|im_end|>"]}}
    files |= {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    planned = [*text_tensors(folder, config, seed), *tensors_of_eyes(folder, config, seed)]
    written = folder.with_name("weights")
    write_folder(written, planned, config)
    (written / "model.safetensors").rename(folder / "model.safetensors")
    (written / "config.json").unlink()
    written.rmdir()


def text_tensors(folder: pathlib.Path, config: dict, seed: int) -> list[Planned]:
    """Of the language model, as a run begins."""
    opened = prepare(folder, dtype="float32")
    with jax.set_mesh(opened.mesh):
        params = opened.model.init(jax.random.key(seed))
    shape = opened.model.config
    return list(weights.planned(shape, params, lambda b: registry.names(config, shape, b), np.dtype(np.float32)))


def tensors_of_eyes(folder: pathlib.Path, config: dict, seed: int) -> list[Planned]:
    """Of the encoder, which nothing trains: products keep the size of what they are given, norms are one."""
    encoder = Encoder.make(sight_of(folder, config).encoder, jnp.float32, MeshSpec().build(jax.devices()[:1]))
    shapes = needed(flatten_dict(encoder.shapes), encoder.layers, encoder.config.names())
    rng, planned = np.random.default_rng(seed), []
    for name, shape in shapes.items():
        drawn = (
            rng.normal(0, np.prod(shape[1:]) ** -0.5, shape) if len(shape) > 1 else np.full(shape, "bias" not in name)
        )
        planned.append(Planned(name, np.dtype(np.float32), shape, lambda a=drawn: a.astype(np.float32)))
    return planned


def main(output: pathlib.Path, train: int = 600, validation: int = 60) -> None:
    (output / "images").mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate({"train": train, "validation": validation}.items()):
        lines = [json.dumps(chat) + "\n" for chat in conversations(output, name, count, seed)]
        (output / f"{name}.jsonl").write_text("".join(lines))
    if not (output / "model").exists():
        write_model(output / "model")
    print(
        f"{train} conversations to train on and {validation} to validate in {output}, and a model, {output / 'model'}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/square_chats.py FOLDER")
    main(pathlib.Path(sys.argv[1]))
