"""Loss, perplexity and bits per byte of a checkpoint on text files, as one line of JSON.

python -m launch.eval --checkpoint=runs/tiny --text=README.md
python -m launch.eval --checkpoint=FOLDER --text='corpus/*.jsonl' --seq_len=4096 --fsdp=8
"""

import json

from absl import flags

from launch.flags import run
from shardlm.errors import ShardlmError

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run, one checkpoint in it, or a Hugging Face folder or name.")
_TEXT = flags.DEFINE_list("text", [], "Files, directories or globs of text, JSONL or Parquet.")
_TEXT_KEY = flags.DEFINE_string("text_key", "text", "The JSONL key or Parquet column that holds the text.")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 1024, "Tokens that are scored with each other.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 8, "Rows at once.", lower_bound=1)
_FSDP = flags.DEFINE_integer("fsdp", 1, "Devices that rows and weights are split over.", lower_bound=1)
_TENSOR = flags.DEFINE_integer("tensor", 1, "Devices that heads and hidden layers are split over.", lower_bound=1)
_PRECISION = flags.DEFINE_enum("precision", None, ["fp32", "bf16", "fp16"], "By default the run's, or fp32.")
_EMA = flags.DEFINE_bool("ema", False, "The averaged weights of a run (optim.ema_decay).")
_CACHE_DIR = flags.DEFINE_string("cache_dir", "data", "Tokenised text is kept here.")


def main() -> int:
    if not _CHECKPOINT.value or not _TEXT.value:
        raise ShardlmError("--checkpoint=RUN_OR_FOLDER and --text=FILES are needed")
    from launch.devices import prepare_for
    from shardlm.mesh import MeshSpec
    from shardlm.train.scoring import score

    prepare_for(_CHECKPOINT.value, _FSDP.value * _TENSOR.value)
    values = score(
        _CHECKPOINT.value,
        _TEXT.value,
        mesh=MeshSpec(fsdp=_FSDP.value, tensor=_TENSOR.value),
        seq_len=_SEQ_LEN.value,
        global_batch=_BATCH.value,
        precision=_PRECISION.value,
        text_key=_TEXT_KEY.value,
        cache_dir=_CACHE_DIR.value,
        ema=_EMA.value,
    )
    print(json.dumps(values))
    return 0


if __name__ == "__main__":
    run(main, needs_config=False)
