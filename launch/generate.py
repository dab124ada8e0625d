"""Continues a prompt with a trained checkpoint, or one of Hugging Face.

python -m launch.generate --checkpoint=runs/tiny --prompt='def '
python -m launch.generate --checkpoint=FOLDER --chat --prompt='What is a mesh?' --system='Answer in one line.'
python -m launch.generate --checkpoint=runs/tiny/checkpoints/400 --prompt='class ' --temperature=0 --max_new_tokens=64
"""

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
_EMA = flags.DEFINE_bool("ema", False, "Use the averaged weights (optim.ema_decay).")


def main() -> int:
    if not _CHECKPOINT.value or not _PROMPT.value:
        raise ShardlmError("--checkpoint=RUN_DIR and --prompt=TEXT are needed")
    from launch.devices import prepare_for
    from shardlm.chat import ChatTemplate
    from shardlm.generate import Sampling, stream
    from shardlm.mesh import MeshSpec
    from shardlm.opened import load

    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _SEED.value)
    prepare_for(_CHECKPOINT.value, _TENSOR.value)
    opened = load(_CHECKPOINT.value, mesh=MeshSpec(tensor=_TENSOR.value), ema=_EMA.value, decoding=True)
    tokenizer = opened.tokenizer
    if _CHAT.value:
        system = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
        messages = [*system, {"role": "user", "content": _PROMPT.value}]
        prompt = tokenizer.encode(ChatTemplate.load(opened.folder).render(messages, add_generation_prompt=True))
    else:
        prompt = tokenizer.encode_prompt(_PROMPT.value)
        print(_PROMPT.value, end="", flush=True)
    what = (opened.model, opened.params, opened.mesh, tokenizer, prompt)
    for text in stream(*what, _MAX_NEW_TOKENS.value, sampling, opened.stop_ids):
        print(text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    run(main, needs_config=False)
