"""Answers a file of requests in OpenAI's Batch format, as vLLM's `run-batch` does.

python -m launch.run_batch --model=FOLDER -i requests.jsonl -o answers.jsonl
python -m launch.run_batch --model=FOLDER -i requests.jsonl.gz -o answers.jsonl --resume   # what is not there yet

Each line is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}; the urls are those that
launch.serve answers, by the same handlers. Each answer is a line, when it ends: {"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}. A line that cannot be asked is one with an error, and ends nothing. `-`
is the standard input or output. The status is 0 where all lines have an answer or an error, whatever these say; 1 where
the input could not be read to its end, the output not written, or the engine ended.

Several hosts, replicas and GPUs: as launch.serve. Process 0 has the files.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable

from absl import flags

from launch.flags import run as run_main
from shardlm.distributed import joined
from shardlm.errors import ShardlmError
from shardlm.progress_bar import SAY_SECONDS
from shardlm.serve.outputs import EngineError

try:
    from launch import model_flags
    from shardlm.serve.api.app import endpoints
    from shardlm.serve.api.batches.files import Input, Output
    from shardlm.serve.api.batches.run import Counts, run
    from shardlm.serve.api.service import Service
    from shardlm.serve.api.settings import Settings
except ModuleNotFoundError as error:
    sys.exit(f"error: a batch needs {error.name}; pip install 'shardlm[serve]'")

_INPUT = flags.DEFINE_string("input_file", None, "Lines of requests, also compressed; - for stdin.", short_name="i")
_OUTPUT = flags.DEFINE_string("output_file", None, "Where answers go, a new file; - for stdout.", short_name="o")
_RESUME = flags.DEFINE_bool("resume", False, "The output has answers; answer the lines whose custom_id it lacks.")
OF_VLLM = {
    **model_flags.OF_VLLM,
    "output_tmp_dir": "the output is a file of this machine: leave it out",
    "enable_metrics": "launch.serve has metrics; here the log says how far it is",
}
# Lines under way for each that the engine runs at once: as many again wait, so that it never does (vLLM's number).
WAITING = 2
UNBOUNDED = 2**31  # the server's bound of those who wait; here that is WAITING


def main() -> int:
    model_flags.model()
    if not _INPUT.value or not _OUTPUT.value:
        raise ShardlmError("--input_file=REQUESTS.jsonl and --output_file=ANSWERS.jsonl are needed")
    settings = Settings(**model_flags.model_settings(), max_queue=UNBOUNDED)  # refused before a model is opened
    processes = model_flags.job()
    first = processes is None or processes.process_id == 0
    # Of a request that the server would read, and what stands around it.
    files = (Input(_INPUT.value, settings.max_body + 2**16), Output(_OUTPUT.value, _RESUME.value)) if first else ()
    with joined(processes):
        llm, sampling = model_flags.opened(processes.num_processes if processes else 1, paced=False)
        answer(llm, Settings(**model_flags.model_settings(sampling), max_queue=UNBOUNDED), *files)
    return 0


def answer(llm, settings: Settings, requests: Input, output: Output) -> None:
    """Raises ShardlmError where not all lines have an answer or an error."""
    counts = Counts()
    try:
        asyncio.run(_answered(llm, settings, requests, output, counts))
    except EngineError as error:
        written = counts.done + counts.failed
        raise ShardlmError(f"{error}; lines written: {written:,}, and --resume goes on with the others") from None
    finally:
        output.close()
        llm.shutdown()


async def _answered(llm, settings: Settings, requests: Input, output: Output, counts: Counts) -> None:
    service = Service(llm, settings)
    most = WAITING * llm.max_num_seqs
    say = _teller(llm, requests, counts)
    telling = asyncio.create_task(_tell(say))
    how = {"most": most, "check": llm.check_health}
    try:
        write = lambda line, _: output.write(line)  # noqa: E731
        await run(requests.lines(), endpoints(service), write, output.known, counts, **how)
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
        say()


async def _tell(say: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(SAY_SECONDS)
        say()


def _teller(llm, requests: Input, counts: Counts) -> Callable[[], None]:
    """Says on stderr how far it is, and how fast."""
    began, before = time.monotonic(), llm.stats()

    def say() -> None:
        now, seconds = llm.stats(), max(time.monotonic() - began, 1e-9)
        share, more = requests.share(), f", {counts.before:,} before" if counts.before else ""
        words = [
            f"lines: {counts.done:,} answered, {counts.failed:,} failed{more}",
            f"{counts.running:,} under way" + ("" if share is None else f", {share:.0%} of the input read"),
        ]
        read, wrote = now.prompt_tokens - before.prompt_tokens, now.generation_tokens - before.generation_tokens
        words.append(f"{read:,} tokens read, {wrote:,} written in {seconds:.1f} s ({wrote / seconds:,.1f} tokens/s)")
        print("; ".join(words), file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    run_main(main, needs_config=False, processes=True, other_names=OF_VLLM)
