"""What users of vLLM write that is not here, or under another name: refused with what to write instead, where it would
change a reply. None is as good as left out. No jax."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from shardlm.errors import ShardlmError

T = TypeVar("T", bound=type)
_BEAMS = "LLM.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=64)) searches"
_IDS = 'prompts that are tokens are {"prompt_token_ids": ids}, and truncate_prompt_tokens of SamplingParams cuts them'
SAMPLING = {
    "guided_decoding": "it is called structured_outputs, a StructuredOutputs or a mapping",
    "logits_processors": "logit_bias, allowed_token_ids, bad_words and structured_outputs say what may be written",
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping", "num_beams", "beam_width"), _BEAMS),
    "output_kind": "outputs of AsyncLLM have all text so far, and LLM gives the last",
    "extra_args": "what is asked of a reply is a field of its own",
    "flat_logprobs": "outputs[0].logprobs has a mapping for each token",
    "logprob_token_ids": "logprobs=20 has the likeliest tokens; LLM.score has those of a text that is given",
    "skip_reading_prefix_cache": 'prompts with a "cache_salt" of their own share nothing',
    "max_new_tokens": "it is called max_tokens",
    "do_sample": "temperature=0 is greedy",
    "num_return_sequences": "it is called n",
}
BEAMS = {
    "num_beams": "it is called beam_width",
    "n": "beam_width replies are given",
    "early_stopping": "beams go on until max_tokens, or until all have ended",
    "max_new_tokens": "it is called max_tokens",
}
STRUCTURES = {
    "json_object": 'it is json={"type": "object"}',
    "whitespace_pattern": "white space between the parts of a JSON text is free",
}
_HUB = "the hub's main branch is read, into HF_HOME; fetch another one yourself and give its folder"
_CONFIG_JSON = "change config.json, in the model's folder or in one that links to its other files"
_DRAFTS = 'it is speculative_config, {"model": SMALLER, "num_speculative_tokens": 4} or {"method": "ngram", ...}'
_ANY = "any model generates and embeds (LLM.embed, /v1/embeddings): leave it out"
# Of the engine's options, by vLLM's names.
ENGINE = {
    "tokenizer": "it is that of the model's folder",
    "skip_tokenizer_init": "prompts may be token ids, and SamplingParams(detokenize=False) leaves texts out",
    "chat_template": "it is the chat_template.jinja of the model's folder; LLM.chat takes another one",
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision", "download_dir"), _HUB),
    **dict.fromkeys(("hf_overrides", "rope_scaling", "rope_theta", "hf_config_path", "config_format"), _CONFIG_JSON),
    **dict.fromkeys(("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max"), _DRAFTS),
    **dict.fromkeys(("task", "runner", "convert"), _ANY),
    **dict.fromkeys(("pooler_config", "override_pooler_config"), "embeddings are of a text's last token, of length 1"),
    "kv_cache_memory_bytes": "it is called kv_cache_bytes, of all devices together",
    "num_gpu_blocks_override": "gpu_memory_utilization and kv_cache_bytes say how many pages there are",
    "cpu_offload_gb": "weights rest on GPUs: quantization makes them smaller, tensor_parallel_size splits them",
    "enable_sleep_mode": "memory is given back where the process ends",
    "max_logprobs": "up to 20 alternatives of each token are told",
    "logprobs_mode": "log-probabilities are the model's own, before penalties and temperature (raw_logprobs)",
    "generation_config": "LLM takes the checkpoint's for prompts that come without SamplingParams",
    "override_generation_config": "give SamplingParams with the prompts",
    "media_io_kwargs": "images are in RGB, on white where transparent; mm_processor_kwargs has num_frames and fps",
    "language_model_only": 'it is limit_mm_per_prompt={"image": 0}',
    "device": "JAX_PLATFORMS=cpu or cuda, in the environment, chooses it",
    "enable_expert_parallel": "it is mesh=MeshSpec(expert=N)",
}
# Options of vLLM's that change no reply and decide what this engine does not do, or always does.
MEANINGLESS = (
    *("trust_remote_code", "enforce_eager", "disable_log_stats", "disable_log_requests", "enable_log_requests"),
    *("disable_custom_all_reduce", "distributed_executor_backend", "enable_chunked_prefill", "max_seq_len_to_capture"),
    *(
        "swap_space",
        "kv_offloading_backend",
        "load_format",
        "async_scheduling",
        "compilation_config",
        "tokenizer_mode",
    ),
    *("cuda_graph_sizes", "attention_backend", "scheduling_policy", "preemption_mode", "num_scheduler_steps"),
    *("guided_decoding_backend", "structured_outputs_config", "max_num_partial_prefills", "disable_cascade_attn"),
    *("max_long_partial_prefills", "long_prefill_token_threshold", "use_v2_block_manager", "num_lookahead_slots"),
    *("mm_processor_cache_gb", "mm_processor_cache_type", "disable_mm_preprocessor_cache", "mm_encoder_tp_mode"),
    *("skip_mm_profiling", "max_parallel_loading_workers", "fully_sharded_loras", "lora_dtype"),
)
CALLS = {
    "prompt_token_ids": _IDS,
    "tokenization_kwargs": _IDS,
    "guided_options_request": "give SamplingParams(structured_outputs=...)",
    "chat_template_content_format": "templates are given contents as texts",
}
# Of the class LLM, which has no such attributes.
METHODS = {
    "encode": "embed gives a vector for each prompt",
    "reward": "classify(prompts, use_activation=False) has the numbers of a head that a checkpoint has as score.weight",
    "llm_engine": "it is called engine",
    "get_metrics": "engine.stats() counts, and each RequestOutput has metrics, its times",
    "collective_rpc": "the model's parameters are engine.runner.params; update_weights gives it others",
    "apply_model": "the model's parameters are engine.runner.params; update_weights gives it others",
    "sleep": "memory is given back where the process ends",
    "wake_up": "memory is given back where the process ends",
    "start_profile": "jax.profiler.trace(FOLDER) around a call traces it",
    "stop_profile": "jax.profiler.trace(FOLDER) around a call traces it",
    "set_tokenizer": "the tokenizer is that of the model's folder",
    "preprocess_chat": "get_tokenizer().apply_chat_template(messages) gives the prompt's tokens",
}


def refuse(what: str, others: Mapping[str, Any], known: Collection[str], instead: Mapping[str, str]) -> None:
    """Raises ShardlmError for the first of `others` that is not None, which is none of the `known` names of `what`."""
    for name, value in others.items():
        if value is None:
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = instead.get(name) or (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
        raise ShardlmError(f"{what} has no {name} (given: {value!r:.100}); {hint}")


def knows_others(what: str, instead: Mapping[str, str]) -> Callable[[T], T]:
    """A frozen dataclass whose constructor refuses other names than its own as `refuse` does, and which says how it is
    changed, as vLLM's examples do with get_default_sampling_params()."""

    def with_others(cls: T) -> T:
        own, known = cls.__init__, tuple(cls.__dataclass_fields__)

        @functools.wraps(own)
        def init(self, *values: Any, **named: Any) -> None:
            refuse(what, {name: value for name, value in named.items() if name not in known}, known, instead)
            own(self, *values, **{name: value for name, value in named.items() if name in known})

        def keep(self, name: str, value: Any) -> None:
            change = f"dataclasses.replace(it, {name}={value!r:.100}) makes another one"
            raise dataclasses.FrozenInstanceError(
                f"{what} stays as it was made, so that requests can share it; {change}"
            )

        cls.__init__, cls.__setattr__ = init, keep
        return cls

    return with_others
