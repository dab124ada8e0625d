"""A model to call from Python, as users of vLLM's class of the same name expect: prompts in, texts out."""

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.hf_files import read_generation
from shardlm.life import alive
from shardlm.mesh import MeshSpec
from shardlm.opened import describe
from shardlm.progress_bar import count_bar
from shardlm.serve import prompts as prompt_forms
from shardlm.serve.adapter_table import LoRARequests
from shardlm.serve.adapters import names_of
from shardlm.serve.api.reasoning.choose import bounded, choose
from shardlm.serve.batch_images import WAITING, BatchImages
from shardlm.serve.beam_search import (
    Beams,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    check_order,
    search,
)
from shardlm.serve.build import build
from shardlm.serve.defaults import recommended
from shardlm.serve.hf_tokenizer import HfTokenizer
from shardlm.serve.images import Given, check_cut, checked, given_with, of_engine
from shardlm.serve.live_encoder import new_encoder
from shardlm.serve.live_weights import new_draft, new_weights
from shardlm.serve.media import MediaRules, files_here
from shardlm.serve.messages import rendered
from shardlm.serve.option_types import check_model, check_seed
from shardlm.serve.options import config_of
from shardlm.serve.other_names import CALLS, METHODS, refuse
from shardlm.serve.outputs import EngineError, RequestOutput, whole
from shardlm.serve.prompts import Prompt
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.thoughts import Thoughts
from shardlm.tokenizer import Tokenizer
from shardlm.vision.image_parts import BadMessage, Sent, images_in, plain_text, videos_in
from shardlm.vision.image_places import encoded, shown
from shardlm.vision.picture import Picture

Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """`LLM(model=DIR).generate(prompts, SamplingParams(...))`. Calls of several threads take turns: their requests run
    together in AsyncLLM. Ctrl-C ends a call, and the next one finds nothing of it, nor what was cached."""

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        mesh: MeshSpec | None = None,
        seed: int | None = None,
        reasoning_parser: str = "auto",
        allowed_media_domains: Sequence[str] | None = None,
        allowed_local_media_path: str | os.PathLike = "",
        devices: Sequence[Any] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        **options,
    ):
        """Loads a Hugging Face folder, a file of llama.cpp, adapters or a run, and compiles its programs.

        Args:
          seed: of all replies whose own parameters have none, in the order in which they are asked for.
          reasoning_parser: how replies mark their thoughts, for thinking_token_budget, as of launch.serve.
          allowed_media_domains, allowed_local_media_path: where `chat` takes images and videos from (media.py).
          devices: of jax, over the first of which the mesh is; all by default. Of several processes, devices of this
            one alone make an engine that the others have no part in.
          progress: is called with how many programs of how many are compiled.
          options: fields of EngineConfig (build.py): max_model_len, block_size, quantization, ...

        Raises: ShardlmError for what does not fit or is not there.
        """
        check_model(model)
        check_seed(seed)
        sizes = MeshSpec(tensor=tensor_parallel_size, pipeline=pipeline_parallel_size, data=data_parallel_size)
        config = config_of(sizes, mesh, options)
        self._media = MediaRules.of(allowed_media_domains, allowed_local_media_path)
        # What can be refused of texts is, before minutes go into weights and programs.
        self.folder = describe(model).folder
        self.tokenizer = Tokenizer.load(self.folder)
        self._usual = recommended(read_generation(self.folder))
        self._reasoning = choose(reasoning_parser, ChatTemplate.find(self.folder), self.tokenizer)
        self.engine, _ = build(model, config, progress, devices)
        self._images = of_engine(self.engine, options.get("limit_mm_per_prompt"))
        self._ids = itertools.count()
        self._turn = threading.Lock()
        self._interrupted = False
        self._seeds = None if seed is None else random.Random(seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequests = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        _embed: bool = False,
        **others: Any,
    ) -> list[RequestOutput]:
        """Replies to prompts (texts, token ids, or mappings with either), in their order; `error` says of one what
        broke it. A terminal shows how many are done. `lora_request`: an adapter for all, or one or None for each, which
        is loaded where it is not (EngineConfig.enable_lora). `mm_processor_kwargs`: how images are prepared, of prompts
        that do not say it themselves. Raises ShardlmError, before any runs, for a prompt or
        parameters that cannot be served, and EngineError where the engine ended."""
        refuse("LLM.generate", others, ("prompts", "sampling_params", "use_tqdm", "lora_request", "priority"), CALLS)
        every = prompt_forms.several(prompts)
        texts = [prompt_forms.read(one, self.tokenizer) for one in every]
        salts = [prompt_forms.salt_of(one) for one in every]
        images = [given_with(one, mm_processor_kwargs) for one in every]

        def of_text(prompt: int) -> Thoughts:
            ids, text = texts[prompt]
            return self._reasoning.of_text(self.tokenizer.decode(ids, skip_special=False) if text is None else text)

        return self._run(texts, sampling_params, use_tqdm, of_text, lora_request, priority, _embed, salts, images)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or to several, by the checkpoint's chat template or by the text of another."""
        forms = ("auto", "string", "openai") if self._images else ("auto", "string")
        if others.get("chat_template_content_format") in forms:
            del others["chat_template_content_format"]
        refuse("LLM.chat", others, ("messages", "chat_template", "tools", "chat_template_kwargs"), CALLS)
        own = ChatTemplate.load(self.folder) if chat_template is None else ChatTemplate(chat_template)
        form = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        marks = {"token": self._images.token, "video": self._images.video_token} if self._images else {"token": ""}
        write = functools.partial(rendered, own, tools=tools, options=chat_template_kwargs, **marks, **form)
        chats = prompt_forms.conversations(messages)
        written = [write(one) for one in chats]
        texts = [shown(text, **marks) for text in written]

        def of_chat(prompt: int) -> Thoughts | None:
            last = chats[prompt][-1].get("content") if continue_final_message else None
            begun = plain_text(last, "messages") or "" if continue_final_message else None
            return self._reasoning.of(texts[prompt], begun, ()).thoughts

        coding = {"tokenizer": self.tokenizer, "encode": self.tokenizer.encode, **marks}
        ids = [encoded(one, **coding) for one in written]
        how = checked(mm_processor_kwargs or {})
        both = (self._sent([find(one) for one in chats]) for find in (images_in, videos_in))
        images = [Given(own, how, videos) for own, videos in zip(*both, strict=True)]
        asked = list(zip(ids, texts, strict=True))
        return self._run(asked, sampling_params, use_tqdm, of_chat, lora_request, images=images)

    def _sent(self, every: Sequence[Sequence[Sent]]) -> list[list[Any]]:
        """Of each conversation its images, or videos, those with an address as files. Raises BadMessage for one that
        cannot be had."""
        asked = [sent for own in every for sent in own if sent.by_address]
        found = files_here([sent.value for sent in asked], self._media, [sent.video for sent in asked]) if asked else []
        for sent, file in zip(asked, found, strict=True):
            if isinstance(file, ShardlmError):
                raise BadMessage(f"{sent.param}: {file}", sent.param)
        files = iter(found)
        return [[next(files) if sent.by_address else sent.value for sent in own] for own in every]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best of params.beam_width texts that go on from each prompt, and begin with it. All prompts at once, or
        `concurrency_limit` of them. Raises as `generate` does, and EngineError where a request broke."""
        if not isinstance(params, BeamSearchParams):
            what = type(params).__name__
            raise ShardlmError(f"params is a {what}; give shardlm.BeamSearchParams(beam_width, max_tokens)")
        check_order(self.engine.sight)
        every = prompt_forms.several(prompts)
        salts = [{"cache_salt": salt} if (salt := prompt_forms.salt_of(one)) else {} for one in every]
        each = list(lora_request) if isinstance(lora_request, Sequence) else [lora_request] * len(every)
        if len(each) != len(every):
            raise ShardlmError(f"{len(every)} prompts and {len(each)} in lora_request; give one, or one for each")
        if any(given_with(one).media for one in every):
            raise ShardlmError("LLM.beam_search reads text; LLM.generate takes prompts with images")
        texts = [prompt_forms.read(one, self.tokenizer)[0] for one in every]
        sizes = (params, self.engine.stop_ids, self.engine.max_model_len)
        searches = [Beams(ids, *sizes, lora_request=one) for ids, one in zip(texts, each, strict=True)]

        def ask(first: int, running: list[tuple[int, BeamSearchSequence]]) -> Sequence[RequestOutput]:
            asked = [{"prompt_token_ids": beam.tokens, **salts[first + number]} for number, beam in running]
            adapters = [beam.lora_request for _, beam in running]
            return whole(self.generate(asked, searches[0].ask, use_tqdm=False, lora_request=adapters))

        at_once = concurrency_limit or max(1, len(searches))
        with count_bar("prompts", len(searches), use_tqdm) as tell:
            for first in range(0, len(searches), at_once):
                search(searches[first : first + at_once], functools.partial(ask, first))
                tell(min(first + at_once, len(searches)))
        found = [one.found() for one in searches]
        for beam in itertools.chain.from_iterable(found):
            beam.text = self.tokenizer.decode(beam.tokens, skip_special=False)
        return [BeamSearchOutput(beams) for beams in found]

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        *others: Any,
        lora_request: LoRARequests = None,
        **named: Any,
    ) -> list[list[float]]:
        """The log-probability of each token of each prompt but the first, given those before it. Raises EngineError
        where one could not be read."""
        if others or named:  # vLLM's compares two texts
            raise ShardlmError(
                "LLM.score tells the log-probabilities of prompts' tokens, of one text or a list: it takes no second "
                "text; numpy.dot of two vectors of LLM.embed compares texts"
            )
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        outputs = whole(self.generate(prompts, params, lora_request=lora_request))
        return [[place.chosen.logprob for place in output.prompt_logprobs[1:]] for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        lora_request: LoRARequests = None,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[list[float]]:
        """A vector for each prompt, what the model makes of its last token: of length 1 unless `normalize` is False,
        and its first `dimensions` alone where the model was trained for them (pooling.py). Raises as `score`."""
        pooling = self.engine.pooling
        pooling.check(dimensions)
        outputs = self.generate(prompts, SamplingParams(max_tokens=0), lora_request=lora_request, _embed=True)
        return [pooling.vector(output.hidden, dimensions, normalize) for output in whole(outputs)]

    def classify(self, prompts: Prompt | Sequence[Prompt], *, use_activation: bool = True) -> list[list[float]]:
        """Of each prompt the probabilities of the classes of a model that classifies, or with use_activation=False
        their logits. Raises as `score`, and ShardlmError for a model without a head for that."""
        classifier = self.engine.pooling.need_classifier()
        outputs = self.generate(prompts, SamplingParams(max_tokens=0), _embed=True)
        return [classifier.classes(output.hidden, use_activation) for output in whole(outputs)]

    def prepared(self, image: Any) -> Picture:
        """An image as this model's encoder reads it (Images.prepared); once, however often it comes."""
        return self._images.prepared(image)

    def get_default_sampling_params(self) -> SamplingParams:
        """What prompts get that come without: the checkpoint's generation_config.json, else SamplingParams()."""
        return SamplingParams(**self._usual)

    def get_tokenizer(self) -> HfTokenizer:
        """The model's, as programs know those of Hugging Face (`tokenizer` is our own)."""
        return HfTokenizer(self.tokenizer, self.folder)

    def __getattr__(self, name: str) -> Any:
        """For what is not there: says so, and of what vLLM's class has, what to write instead."""
        hint = f"; {METHODS[name]}" if name in METHODS else ""
        raise AttributeError(f"LLM has no attribute {name!r}{hint}", name=name, obj=self)

    def update_weights(self, weights: Any, draft: Any = None) -> None:
        """New weights: the path of another checkpoint of this model, or a tree as `TrainState.params`; and of the draft
        model, which without them stays: replies are the model's own in any case, and an old draft is right less often.
        A checkpoint's encoder of images comes with it, and of a tree what a run trains of one; the rest of the old one
        stays. Nothing is compiled, and the prefix cache is emptied. Raises ShardlmError for what does not fit; the
        old ones stay then."""
        with self._in_turn():
            runner = self.engine.runner
            drafts, params = new_draft(draft, runner), new_weights(weights, runner)
            self.engine.update_weights(params, drafts, new_encoder(weights, runner))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Nothing that was computed for earlier prompts is found again, as before a measurement. Whether that is so: no
        request of another thread can run meanwhile. The arguments are vLLM's, whose caches outside of the engine are
        not here."""
        if reset_connector:
            raise ShardlmError("reset_connector=True: no cache is kept outside of the engine; leave it out")
        with self._in_turn():
            return self.engine.reset_prefix_cache(reset_running_requests)

    def _run(
        self,
        texts: Sequence[tuple[Sequence[int], str | None]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        shown: bool,
        thoughts: Callable[[int], Thoughts | None],
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        embed: bool = False,
        salts: Sequence[str] = (),
        images: Sequence[Given] = (),
    ) -> list[RequestOutput]:
        """`thoughts`: of the replies to a prompt, by its number. `images`: of each prompt."""
        turns = prompt_forms.priorities_of(priority, len(texts))
        most = self.engine.max_model_len
        seen = BatchImages(self._images, [ids for ids, _ in texts], images or [Given()] * len(texts), most)
        ids = [f"request-{next(self._ids)}" for _ in texts]
        with self._in_turn():
            usual = self.get_default_sampling_params()
            each = [
                bounded(self._reasoning, self._seeded(one), lambda _, number=number: thoughts(number))
                for number, one in enumerate(prompt_forms.params_of(params, usual, len(texts)))
            ]
            for own, given in zip(each, images, strict=False):
                if given.media:
                    check_cut(own)
            adapters = names_of(self.engine, lora_request, len(ids))

            def add(i: int) -> None:
                tokens, pictures = seen.take(i)
                options = {"text": texts[i][1], "priority": turns[i], "salt": salts[i] if salts else ""}
                options |= {"adapter": adapters[i], "embed": embed, "pictures": pictures}
                self.engine.add(ids[i], tokens, each[i], **options)

            try:
                for i in range(added := seen.first):
                    add(i)
                done: dict[str, RequestOutput] = {}
                with count_bar("prompts", len(ids), shown) as tell:
                    while len(done) < len(ids):
                        while added < len(ids) and self.engine.stats().num_waiting < WAITING:
                            add(added)
                            added += 1
                        done |= {output.request_id: output for output in self.engine.step() if output.finished}
                        alive()
                        tell(len(done))
            except Exception:
                for id in ids:
                    self.engine.abort(id)
                raise
        return [done[id] for id in ids]

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """The engine, for one thread at a time. What is no Exception comes in the midst of anything, and may come again
        while the engine is made as new: then that is done before it is used."""
        with self._turn:
            if self._interrupted:
                self.engine.renew()
            self._interrupted = True
            try:
                yield
            except BaseException as error:
                if not isinstance(error, Exception):
                    with contextlib.suppress(EngineError):  # other processes cannot go on; the next call says so
                        self.engine.renew()
                self._interrupted = False
                raise
            self._interrupted = False

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if self._seeds is None or params.seed is not None:
            return params
        return dataclasses.replace(params, seed=self._seeds.getrandbits(63))
