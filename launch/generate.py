"""Continues a prompt with a trained checkpoint, or one of Hugging Face.

python -m launch.generate --checkpoint=runs/tiny --prompt='def '
python -m launch.generate --checkpoint=FOLDER --chat --prompt='What is a mesh?' --system='Answer in one line.'
python -m launch.generate --checkpoint=FOLDER --chat --image=photo.jpg --prompt='What is this?'
python -m launch.generate --checkpoint=runs/tiny/checkpoints/400 --prompt='class ' --temperature=0 --max_new_tokens=64
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from launch.flags import run
from shardlm.errors import ShardlmError

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run, one checkpoint in it, a Hugging Face folder, or *.gguf.")
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 200, "Tokens to add at most.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 takes the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from this many most likely tokens; 0: from all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the most likely tokens that reach this probability.")
_SEED = flags.DEFINE_integer("seed", 0, "The same seed gives the same text.")
_TENSOR = flags.DEFINE_integer("tensor", 1, "Devices to split the model over.", lower_bound=1)
_CHAT = flags.DEFINE_bool("chat", False, "The prompt is a user's message: apply the checkpoint's chat template.")
_SYSTEM = flags.DEFINE_string("system", "", "With --chat, a message from the system before it.")
_IMAGE = flags.DEFINE_multi_string(
    "image", [], "With --chat, a file or an address of an image that the message has before its words; may be repeated."
)
_VIDEO = flags.DEFINE_multi_string("video", [], "The same of a video: MP4, WebM, GIF, ...")
_EMA = flags.DEFINE_bool("ema", False, "Use the averaged weights (optim.ema_decay).")


LONGEST = 16_384  # tokens of a chat with images
# What users of transformers, vLLM and the LM Evaluation Harness may call flags of this command.
OTHER_NAMES = {
    "model": "checkpoint",
    "max_tokens": "max_new_tokens",
    "tensor_parallel_size": "tensor",
    "system_prompt": "system",
    "do_sample": "--temperature=0 takes the most likely token, above it samples",
}


def main() -> int:
    if not _CHECKPOINT.value or not _PROMPT.value:
        raise ShardlmError("--checkpoint=RUN_DIR and --prompt=TEXT are needed")
    if _SYSTEM.value and not _CHAT.value:
        raise ShardlmError("--system is a message before that of a chat: add --chat, or leave it out")
    if _IMAGE.value or _VIDEO.value:
        return answer_with_images()
    from launch.devices import prepare_for
    from shardlm.generate import Sampling, stream
    from shardlm.mesh import MeshSpec
    from shardlm.opened import describe, load
    from shardlm.tokenizer import Tokenizer

    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _SEED.value)
    prepare_for(_CHECKPOINT.value, _TENSOR.value)
    found = describe(_CHECKPOINT.value)
    tokenizer = Tokenizer.load(found.folder)
    prompt = encoded(tokenizer, found.folder)
    room = _MAX_NEW_TOKENS.value
    if found.longest:
        room = min(room, found.longest - len(prompt))
    if room < 1:
        raise ShardlmError(
            f"the prompt has {len(prompt)} tokens, and the model was made for {found.longest} positions: shorten it"
        )
    mesh, length = MeshSpec(tensor=_TENSOR.value), len(prompt) + room
    opened = load(_CHECKPOINT.value, mesh=mesh, length=length, ema=_EMA.value, decoding=True)
    print("" if _CHAT.value else _PROMPT.value, end="", flush=True)
    pieces = 0
    for text in stream(opened.model, opened.params, opened.mesh, tokenizer, prompt, room, sampling, opened.stop_ids):
        print(text, end="", flush=True)
        pieces += 1
    print()
    if room < min(_MAX_NEW_TOKENS.value, pieces):  # the last piece is no token's
        print(f"ended at the {found.longest} positions that the model was made for", file=sys.stderr)
    return 0


def answer_with_images() -> int:
    """Prints what the model says to a message with images and videos."""
    if not _CHAT.value or _EMA.value:
        name = "image" if _IMAGE.value else "video"
        raise ShardlmError(f"--{name} is a part of a chat's message to a checkpoint as it is: add --chat, and no --ema")
    from launch.devices import prepare_for

    prepare_for(_CHECKPOINT.value, _TENSOR.value)
    import jax

    from shardlm import LLM, SamplingParams
    from shardlm.opened import describe

    length = min(describe(_CHECKPOINT.value).longest or LONGEST, LONGEST)
    sizes = {"max_model_len": length, "max_num_seqs": 1, "tensor_parallel_size": _TENSOR.value}
    if jax.default_backend() == "cpu":
        sizes["kv_cache_bytes"] = 2**36  # as many pages as one request has are made
    parts = [*_parts("image_url", _IMAGE.value), *_parts("video_url", _VIDEO.value)]
    content = [*parts, {"type": "text", "text": _PROMPT.value}]
    system = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
    llm = LLM(_CHECKPOINT.value, **sizes, allowed_local_media_path="/")
    how = {"max_tokens": _MAX_NEW_TOKENS.value, "temperature": _TEMPERATURE.value, "seed": _SEED.value}
    params = SamplingParams(**how, top_k=_TOP_K.value, top_p=_TOP_P.value)
    [output] = llm.chat([*system, {"role": "user", "content": content}], params, use_tqdm=False)
    print(output.outputs[0].text)
    return 0


def _parts(kind: str, paths: Sequence[str]) -> list[dict[str, Any]]:
    """Of a message, from files and addresses."""
    addresses = [path if ":" in path else pathlib.Path(path).resolve().as_uri() for path in paths]
    return [{"type": kind, kind: {"url": address}} for address in addresses]


def encoded(tokenizer, folder: pathlib.Path) -> list[int]:
    """Token ids of the prompt, in the chat template of `folder` where that is asked for. Raises ShardlmError where it
    has none."""
    if not _CHAT.value:
        return tokenizer.encode_prompt(_PROMPT.value)
    from shardlm.chat import ChatTemplate

    system = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
    messages = [*system, {"role": "user", "content": _PROMPT.value}]
    return tokenizer.encode(ChatTemplate.load(folder).render(messages, add_generation_prompt=True))


if __name__ == "__main__":
    run(main, needs_config=False, other_names=OTHER_NAMES)
