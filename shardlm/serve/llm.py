"""A model to call from Python, as users of vLLM's class of the same name expect: prompts in, texts out."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.serve.build import EngineConfig, build
from shardlm.serve.live_weights import new_draft, new_weights
from shardlm.serve.outputs import RequestOutput, whole
from shardlm.serve.sampling_params import SamplingParams

Prompt = str | Sequence[int]


class LLM:
    """`LLM(model=DIR).generate(prompts, SamplingParams(...))`. Not for several threads: that is AsyncLLM."""

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        mesh: MeshSpec | None = None,
        **options,
    ):
        """Loads a Hugging Face folder, adapters or a run, and compiles its programs.

        Args:
          options: fields of EngineConfig (build.py): max_model_len, block_size, quantization, ...

        Raises: ShardlmError for what does not fit or is not there.
        """
        sizes = MeshSpec(tensor=tensor_parallel_size, pipeline=pipeline_parallel_size, data=data_parallel_size)
        if mesh is not None and sizes != MeshSpec():
            raise ShardlmError(f"mesh={mesh} and parallel sizes that make {sizes}: give mesh or the sizes, not both")
        config = EngineConfig(mesh=mesh or sizes, **options)
        self.engine, self._opened = build(model, config)
        self.tokenizer, self.folder = self._opened.tokenizer, self._opened.folder
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        _embed: bool = False,
    ) -> list[RequestOutput]:
        """Replies to prompts (texts or token ids), in their order; `error` says of one what broke it. Raises
        ShardlmError, before any runs, for a prompt or parameters that cannot be served, and EngineError where the
        engine ended."""
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
            prompts = [prompts]
        params = sampling_params or SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ShardlmError(f"{len(prompts)} prompts and {len(each)} sampling parameters; give one, or one for each")
        work = [(self._tokens(prompt), prompt, own) for prompt, own in zip(prompts, each, strict=True)]
        return self._run(work, _embed)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one conversation or to several, by the checkpoint's chat template."""
        template = ChatTemplate.load(self._opened.folder)
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [template.render(each, tools, add_generation_prompt=add_generation_prompt) for each in conversations]
        params = sampling_params or SamplingParams()
        return self._run([(self.tokenizer.encode(text), text, params) for text in texts])

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """The log-probability of each token of each prompt but the first, given those before it. Raises EngineError
        where one could not be read."""
        outputs = whole(self.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0)))
        return [[one[0].logprob for one in output.prompt_logprobs[1:]] for output in outputs]

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """A vector of length 1 for each prompt: what the model makes of its last token. Raises as `score`."""
        return [output.embedding for output in whole(self.generate(prompts, SamplingParams(max_tokens=0), _embed=True))]

    def update_weights(self, weights: Any, draft: Any = None) -> None:
        """New weights: the path of another checkpoint of this model, or a tree as `TrainState.params`; and of the draft
        model, which without them stays: replies are the model's own in any case, and an old draft is right less often.
        Nothing is compiled, and the prefix cache is emptied. Raises ShardlmError for what does not fit; the old ones
        stay then."""
        runner = self.engine.runner
        drafts = new_draft(draft, runner)
        self.engine.update_weights(new_weights(weights, runner), drafts)

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt

    def _run(
        self, work: list[tuple[Sequence[int], Prompt, SamplingParams]], embed: bool = False
    ) -> list[RequestOutput]:
        ids = [f"request-{next(self._ids)}" for _ in work]
        try:
            for id, (tokens, prompt, params) in zip(ids, work, strict=True):
                self.engine.add(id, tokens, params, text=prompt if isinstance(prompt, str) else None, embed=embed)
            done: dict[str, RequestOutput] = {}
            while len(done) < len(ids):
                done |= {output.request_id: output for output in self.engine.step() if output.finished}
        except BaseException:
            for id in ids:
                self.engine.abort(id)
            raise
        return [done[id] for id in ids]
