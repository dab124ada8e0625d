"""Tasks of the LM Evaluation Harness (https://github.com/EleutherAI/lm-evaluation-harness) on a model that is served in
this process: what `launch.eval --tasks` runs. Needs the extra `eval`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    lm_eval, TemplateLM = None, object

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.llm import LLM
from shardlm.serve.sampling_params import SamplingParams

GENERATED = 256  # tokens, where a task does not say


def find_tasks(tasks: Sequence[str], include_path: str | None = None) -> "TaskManager":
    """What the harness knows of these tasks, before a model is opened for them. Raises ShardlmError where the harness
    is not installed or does not know one."""
    if lm_eval is None:
        raise ShardlmError("--tasks needs the LM Evaluation Harness: pip install 'shardlm[eval]'")
    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    if any(task not in manager.all_tasks for task in tasks) and include_path:
        manager = TaskManager(include_path=include_path)  # 14,000 files of the harness's own are read for these
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ShardlmError(
            f"the LM Evaluation Harness has no task {unknown[0]!r}; --task_path names a folder of others"
        )
    return manager


def run_tasks(
    llm: LLM,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    manager: "TaskManager | None" = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> Mapping[str, Any]:
    """The harness's results by task. `tasks` are its names; `include_path` is a folder with tasks of one's own, or
    `manager` what `find_tasks` made of them; `limit` the first documents of each. Raises as `find_tasks`."""
    manager = manager or find_tasks(tasks, include_path)
    options = {"limit": limit, "num_fewshot": num_fewshot, "bootstrap_iters": 0}
    found = lm_eval.simple_evaluate(_Model(llm), tasks=list(tasks), task_manager=manager, **options)
    return json.loads(json.dumps(found["results"], default=str))


class _Model(TemplateLM):
    """The harness's view of an LLM: log-likelihoods and texts."""

    def __init__(self, llm: LLM):
        super().__init__()
        self._llm, self._own = llm, llm.tokenizer
        self._longest = llm.engine.max_model_len

    @property
    def eot_token_id(self) -> int:
        return self._llm.engine.stop_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before any text: what the tokenizer puts there, else the end of a text."""
        return next(iter(self._own.encode_prompt("")), self.eot_token_id)

    @property
    def tokenizer_name(self) -> str:
        return "shardlm"

    def apply_chat_template(self, chat_history, add_generation_prompt: bool = True) -> str:
        template = ChatTemplate.load(self._llm.folder)
        return template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        plain = self._own.encode(string)
        if add_special_tokens is False or plain[:1] == [self.prefix_token_id]:
            return plain
        return self._own.encode_prompt(string)

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self._scored(pairs)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            tokens = self._own.encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self._longest - 1, 1)
            totals.append(sum(total for total, _ in self._scored([make_disjoint_window(w) for w in windows])))
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            most = min(options.get("max_gen_toks", GENERATED), self._longest // 2)
            prompts.append(self.tok_encode(context)[-(self._longest - most) :])
            greedy = not options.get("do_sample", False)
            temperature = 0.0 if greedy else options.get("temperature", 1.0)
            stop = [until] if isinstance(until, str) else list(until)
            params.append(SamplingParams(temperature=temperature, max_tokens=most, stop=[s for s in stop if s]))
        return [output.outputs[0].text for output in self._llm.generate(prompts, params)]

    def _scored(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): the continuation's log-probability, and whether greedy decoding gives it. Of
        what is too long, the beginning is left out, as the harness does."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        rows = [([*context, *continuation][-self._longest :], len(continuation)) for context, continuation in pairs]
        found = []
        outputs = self._llm.generate([tokens for tokens, _ in rows], params)
        for output, (_, count) in zip(outputs, rows, strict=True):
            own = [place.chosen for place in output.prompt_logprobs[-count:]]
            found.append((sum(one.logprob for one in own), all(one.rank == 1 for one in own)))
        return found
