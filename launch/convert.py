"""Writes a run's checkpoint, or a file of llama.cpp, as a Hugging Face folder, or a Hugging Face folder as a run,
or either as a Hugging Face folder in few bits.

python -m launch.convert --checkpoint=runs/tiny --output=exported
python -m launch.convert --checkpoint=runs/lora --output=merged --merge
python -m launch.convert --checkpoint=model-Q4_K_M.gguf --output=exported
python -m launch.convert --checkpoint=FOLDER --output=runs/opened
python -m launch.convert --checkpoint=FOLDER --output=few --quantization=W4A16
"""

import pathlib
import shlex

from absl import flags

from launch.flags import run
from shardlm.errors import ShardlmError

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run or a checkpoint in it, adapters, or a model to open.")
_OUTPUT = flags.DEFINE_string("output", None, "A new folder.")
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Of a Hugging Face folder that is written.")
_SHARD_GB = flags.DEFINE_float("shard_gb", 5.0, "Largest file of a Hugging Face folder that is written.", 1e-6)
_MERGE = flags.DEFINE_bool("merge", False, "Add adapters (lora) into the weights, instead of writing them for PEFT.")
_QUANTIZATION = flags.DEFINE_string(
    "quantization",
    "",
    "Write projections in few bits, as vLLM and SGLang read them: W4A16, W8A16, FP8_DYNAMIC or W8A8.",
)
_EMA = flags.DEFINE_bool("ema", False, "Write the averaged weights of the run (optim.ema_decay).")


# What users of transformers, vLLM and the LM Evaluation Harness may call flags of this command.
OTHER_NAMES = {
    "model": "checkpoint",
    "output_dir": "output",
    "torch_dtype": "dtype",
    "max_shard_size": "shard_gb",
    "merge_and_unload": "merge",
    "scheme": "quantization",
}


def main() -> int:
    if not _CHECKPOINT.value or not _OUTPUT.value:
        raise ShardlmError("--checkpoint=RUN_OR_FOLDER and --output=FOLDER are needed")
    from launch.devices import prepare_for
    from shardlm.gguf_files.choose import meant
    from shardlm.hf_files import behind_it, read_config
    from shardlm.opened import find, is_hf, rank_of
    from shardlm.peft_folder import CONFIG, base_of, is_peft
    from shardlm.train.convert import opened_by, to_hf, to_run
    from shardlm.train.report import python
    from shardlm.vision.registry import sees

    prepare_for(_CHECKPOINT.value, 1)
    folder = find(_CHECKPOINT.value)
    opens = is_hf(folder) and not behind_it(read_config(folder))
    for flag in (_MERGE, _EMA) if opens else ():
        if flag.value:
            raise ShardlmError(
                f"--{flag.name}: {_CHECKPOINT.value} is a Hugging Face model, without adapters or averages, "
                f"and is written as {'a folder' if _QUANTIZATION.value else 'a run'}: leave it out"
            )
    whole = _QUANTIZATION.value or (not opens and (_MERGE.value or not rank_of(folder)))
    for flag in () if whole else (_DTYPE, _SHARD_GB):
        if flag.present:
            what = "runs" if opens else "adapters"
            raise ShardlmError(f"--{flag.name} is of a model's folder; {what} are written in float32: leave it out")
    if opens and not _QUANTIZATION.value:
        to_run(_CHECKPOINT.value, _OUTPUT.value)
        run = shlex.quote(_OUTPUT.value)
        print(f"generate:  {python()} -m launch.generate --checkpoint={run} --prompt='Once upon a time'")
        if sees(read_config(folder)):
            print(f"images:    read by the encoder in {folder}, which has to stay there")
    else:
        shard_bytes = int(_SHARD_GB.value * 1e9)
        options = {"shard_bytes": shard_bytes, "ema": _EMA.value, "merge": _MERGE.value}
        options["quantization"] = _QUANTIZATION.value
        to_hf(_CHECKPOINT.value, _OUTPUT.value, _DTYPE.value, **options)
        output = pathlib.Path(_OUTPUT.value)
        opener = opened_by(output)
        package = "peft" if "Peft" in opener else "transformers"
        if is_peft(output) and (base := meant(pathlib.Path(base_of(output)))):
            print(
                f"{package} opens no file of llama.cpp: write the base as a folder, with --checkpoint={base}, and name"
            )
            print(f"that folder as base_model_name_or_path in {output / CONFIG}")
        beside = " (with the package compressed-tensors)" if _QUANTIZATION.value else ""
        print(f"opens in {package}: {opener}.from_pretrained({_OUTPUT.value!r}){beside}")
    return 0


if __name__ == "__main__":
    run(main, needs_config=False, other_names=OTHER_NAMES)
