"""Loss, perplexity and bits per byte of a checkpoint on text files, its loss on conversations, or its results in tasks
of the LM Evaluation Harness, as one line of JSON.

python -m launch.eval --checkpoint=runs/tiny --text=README.md
python -m launch.eval --checkpoint=FOLDER --text='corpus/*.jsonl' --seq_len=4096 --fsdp=8
python -m launch.eval --checkpoint=runs/sft --text=data/chats/validation.jsonl --chat_template=runs/sft --seq_len=128
python -m launch.eval --checkpoint=FOLDER --tasks=arc_easy,gsm8k --tensor=4
"""

import json

from absl import flags

from launch.flags import run
from shardlm.errors import ShardlmError

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run, one of its checkpoints, *.gguf, or a Hugging Face model.")
_TEXT = flags.DEFINE_list("text", [], "Files, directories or globs of text, JSONL or Parquet.")
_TEXT_KEY = flags.DEFINE_string("text_key", "text", "The JSONL key or Parquet column that holds the text.")
_CHAT_TEMPLATE = flags.DEFINE_string(
    "chat_template",
    "",
    "A folder or file: --text is conversations in JSONL, rendered by its template, with images too.",
)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 1024, "Tokens that are scored with each other.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 8, "Rows at once.", lower_bound=1)
_FSDP = flags.DEFINE_integer("fsdp", 1, "Devices that rows and weights are split over.", lower_bound=1)
_TENSOR = flags.DEFINE_integer("tensor", 1, "Devices that heads and hidden layers are split over.", lower_bound=1)
_PRECISION = flags.DEFINE_enum("precision", None, ["fp32", "bf16", "fp16"], "By default the run's, or fp32.")
_EMA = flags.DEFINE_bool("ema", False, "The averaged weights of a run (optim.ema_decay).")
_TASKS = flags.DEFINE_list("tasks", [], "Instead of --text: tasks of the LM Evaluation Harness (the extra `eval`).")
_TASK_PATH = flags.DEFINE_string("task_path", None, "A folder with tasks of one's own, in the harness's YAML.")
_LIMIT = flags.DEFINE_integer("limit", None, "The first documents of each task.", lower_bound=1)
_FEWSHOT = flags.DEFINE_integer("num_fewshot", None, "Examples before each; by default the task's.", lower_bound=0)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", None, "Of --tasks; by default what the model was made for.", 1)
_CACHE_DIR = flags.DEFINE_string("cache_dir", "data", "Tokenised text is kept here.")
OF_TEXT = (_TEXT_KEY, _CHAT_TEMPLATE, _SEQ_LEN, _BATCH, _FSDP, _PRECISION, _EMA, _CACHE_DIR)
OF_TASKS = (_TASK_PATH, _LIMIT, _FEWSHOT, _MAX_MODEL_LEN)


# What users of transformers, vLLM and the LM Evaluation Harness may call flags of this command.
OTHER_NAMES = {
    "model": "checkpoint",
    "tensor_parallel_size": "tensor",
    "batch_size": "batch",
    "include_path": "task_path",
    "model_args": "--checkpoint=FOLDER names the model",
}


def main() -> int:
    if not _CHECKPOINT.value or bool(_TEXT.value) == bool(_TASKS.value):
        raise ShardlmError("--checkpoint=RUN_OR_FOLDER is needed, and --text=FILES or --tasks=NAMES")
    for flag in OF_TEXT if _TASKS.value else OF_TASKS:
        if flag.present:
            of, instead = ("text", "tasks") if _TASKS.value else ("tasks", "text")
            raise ShardlmError(f"--{flag.name} goes with --{of}, and --{instead} heeds it not: leave it out")
    if _TASKS.value:
        return harness()
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
        chat_template=_CHAT_TEMPLATE.value,
        cache_dir=_CACHE_DIR.value,
        ema=_EMA.value,
    )
    print(json.dumps(values))
    return 0


def harness() -> int:
    from launch.devices import prepare_for
    from shardlm.serve.harness import find_tasks, run_tasks
    from shardlm.serve.llm import LLM

    manager = find_tasks(_TASKS.value, _TASK_PATH.value)  # before the minute that a model takes
    prepare_for(_CHECKPOINT.value, _TENSOR.value)
    sizes = {"tensor_parallel_size": _TENSOR.value, "max_model_len": _MAX_MODEL_LEN.value}
    llm = LLM(_CHECKPOINT.value, **sizes, limit_mm_per_prompt={"image": 0})  # tasks are of texts
    options = {"manager": manager, "limit": _LIMIT.value, "num_fewshot": _FEWSHOT.value}
    print(json.dumps(run_tasks(llm, _TASKS.value, **options)))
    return 0


if __name__ == "__main__":
    run(main, needs_config=False, other_names=OTHER_NAMES)
