"""Continues a prompt with a trained checkpoint.

python -m launch.generate --checkpoint=runs/tiny --prompt='def '
python -m launch.generate --checkpoint=runs/tiny/checkpoints/400 --prompt='class ' --temperature=0 --max_new_tokens=64
"""

import dataclasses

from absl import flags

from launch.flags import run
from shardlm.config_json import from_json
from shardlm.errors import ShardlmError
from shardlm.run_files import find_run
from shardlm.tokenizer import Tokenizer

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run directory, or one checkpoint in it.")
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 200, "Tokens to add at most.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 takes the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from this many most likely tokens; 0: from all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the most likely tokens that reach this probability.")
_SEED = flags.DEFINE_integer("seed", 0, "The same seed gives the same text.")
_TENSOR = flags.DEFINE_integer("tensor", 1, "Devices to split the model over.", lower_bound=1)
_EMA = flags.DEFINE_bool("ema", False, "Use the averaged weights (optim.ema_decay).")


def main() -> int:
    if not _CHECKPOINT.value or not _PROMPT.value:
        raise ShardlmError("--checkpoint=RUN_DIR and --prompt=TEXT are needed")
    files = find_run(_CHECKPOINT.value)
    if files.tokenizer_path is None:
        raise ShardlmError(f"{files.run_dir} has no tokenizer.json; copy the tokenizer that the run trained with there")
    from launch.devices import use_cpu_devices
    from shardlm.generate import Sampling, load, stream
    from shardlm.mesh import MeshSpec
    from shardlm.train.config import RunConfig

    config = from_json(RunConfig, files.config_json)
    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _SEED.value)
    if config.cpu_devices:
        use_cpu_devices(_TENSOR.value)
    spec = dataclasses.replace(MeshSpec(), tensor=_TENSOR.value)
    name = "ema" if _EMA.value else "params"
    model, params, mesh = load(
        config.model.transformer(), config.precision, spec, files.checkpoints_dir, files.step, name
    )
    tokenizer = Tokenizer.load(files.tokenizer_path)
    print(_PROMPT.value, end="", flush=True)
    for text in stream(model, params, mesh, tokenizer, _PROMPT.value, _MAX_NEW_TOKENS.value, sampling):
        print(text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    run(main, needs_config=False)
