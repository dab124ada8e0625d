"""Tokenises text into memory-mapped shards, in parallel.

python -m launch.tokenize --input='corpus/**/*.jsonl,stdlib:train' --output=shards --tokenizer=bpe:32000
python -m launch.tokenize --verify=shards
"""

import os
import time

from absl import flags
from rich import progress

from launch.flags import run
from shardlm.data import corpus
from shardlm.data.prepare import tokenizer_from
from shardlm.data.shards import TokenShards
from shardlm.data.writer import check_output, write_shards
from shardlm.errors import ShardlmError

_INPUT = flags.DEFINE_list("input", [], "Files, directories, globs, stdlib:train or stdlib:validation.")
_OUTPUT = flags.DEFINE_string("output", "", "Directory to make, for the shards and their tokenizer.json.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "bpe:4096", "A tokenizer.json, or bpe:N to train one on the input.")
_TEXT_KEY = flags.DEFINE_string("text_key", "text", "JSONL key or Parquet column that holds the text.")
_ON_BAD_UTF8 = flags.DEFINE_enum(
    "on_bad_utf8", "fail", ["fail", "replace", "skip"], "What to do with a document that is not UTF-8."
)
_NUM_WORKERS = flags.DEFINE_integer(
    "num_workers", len(os.sched_getaffinity(0)), "Processes; 0 uses the tokenizer's threads.", lower_bound=0
)
_VERIFY = flags.DEFINE_string("verify", "", "Only compare the shards in this directory with their checksums.")
OF_WRITING = (_INPUT, _OUTPUT, _TOKENIZER, _TEXT_KEY, _ON_BAD_UTF8, _NUM_WORKERS)


def main() -> None:
    if _VERIFY.value:
        for flag in OF_WRITING:
            if flag.present:
                raise ShardlmError(
                    f"--{flag.name} is of shards that are written, and --verify writes none: leave it out"
                )
        TokenShards.open(_VERIFY.value).verify()
        print(f"{_VERIFY.value}: every byte is as it was written")
        return
    if not _INPUT.value or not _OUTPUT.value:
        raise ShardlmError("--input=FILES and --output=DIR are needed: --help lists what they may be")
    check_output(_OUTPUT.value)
    started = time.perf_counter()
    reading = {"text_key": _TEXT_KEY.value, "on_bad_utf8": _ON_BAD_UTF8.value}
    sources = corpus.find_sources(_INPUT.value)
    total = sum(source.size for source in sources)
    with _progress_bar() as bar:
        task = bar.add_task("reading", total=total)
        show = lambda stage, done, total: bar.update(task, description=stage, completed=done)  # noqa: E731
        tokenizer = tokenizer_from(_TOKENIZER.value, sources, progress=show, **reading)
        shards = write_shards(
            corpus.read_documents(sources, **reading),
            tokenizer,
            _OUTPUT.value,
            num_workers=_NUM_WORKERS.value,
            progress=lambda done: show("tokenising", done, total),
        )
    _print_summary(shards, time.perf_counter() - started)


def _progress_bar() -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )


def _print_summary(shards: TokenShards, seconds: float) -> None:
    print(
        f"{shards.directories[0]}: {shards.num_documents:,} documents, {shards.num_tokens:,} tokens,"
        f" {shards.num_bytes:,} bytes ({shards.bytes_per_token:.3f} a token), vocabulary"
        f" {shards.vocab_size:,}. {seconds:.1f} s, {shards.num_bytes / seconds / 1e6:.1f} MB/s"
    )
    if shards.num_bad_utf8:
        print(f"{shards.num_bad_utf8:,} documents were not UTF-8: on_bad_utf8={_ON_BAD_UTF8.value}")


if __name__ == "__main__":
    run(main, needs_config=False)
