"""What a file of llama.cpp says beside its weights, as the files of a Hugging Face folder: tokenizer, chat templates,
and what to generate with. No jax."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.chat import FILE, FOLDER
from shardlm.errors import ShardlmError
from shardlm.gguf_files.tokenizer import tokenizer_json
from shardlm.gguf_files.vocabulary import Vocabulary

_TEMPLATE = "tokenizer.chat_template"
# Of general.sampling, what generation_config.json calls otherwise or alike.
_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")}
_SAMPLING |= {"temp": "temperature", "penalty_repeat": "repetition_penalty"}


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """{name of a file of the folder: what is in it}.

    Raises:
      ShardlmError: the tokenizer is of a kind that is not supported, or a template has a name that is no file's.
    """
    vocabulary = Vocabulary.of(metadata)
    files = {
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": _pretty(_tokenizer_config(vocabulary)),
        "generation_config.json": _pretty(_generation_config(vocabulary)),
    }
    return files | _templates(metadata)


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    ids = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "unk_token": vocabulary.unknown,
        "pad_token": vocabulary.padding,
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.begins,
        "add_eos_token": vocabulary.closes,
        "clean_up_tokenization_spaces": False,
        **{name: vocabulary.tokens[id] for name, id in ids.items() if id is not None},
    }


def _generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    ends = list(vocabulary.ends)
    ids = {"bos_token_id": vocabulary.bos, "pad_token_id": vocabulary.padding}
    said = {ours: vocabulary.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    found = {
        **ids,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        # Of 32 bits in the file: 0.6 and not 0.60000002.
        **{name: float(str(np.float32(n))) if isinstance(n, float) else n for name, n in said.items()},
    }
    sampled = {"do_sample": True} if any(n is not None for n in said.values()) else {}
    return {name: value for name, value in found.items() if value is not None} | sampled


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The template for chats, and others by their names, as for conversations with tools."""
    files = {FILE: metadata[_TEMPLATE]} if metadata.get(_TEMPLATE) else {}
    for key, template in metadata.items():
        if not key.startswith(f"{_TEMPLATE}."):
            continue
        name = key.removeprefix(f"{_TEMPLATE}.")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ShardlmError(
                f"the file has a chat template by the name {name!r} ({key}), which is to name a file: letters, digits, "
                "- and _ alone are possible. Use another conversion of the model"
            )
        files[f"{FOLDER}/{name}.jinja"] = template
    return files


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
