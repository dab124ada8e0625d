"""Checkpoints that classify texts: decoders with a small matrix, `score`, over what they make of a text's last token
(transformers' ...ForSequenceClassification), and rerankers that say yes or no by two rows of their language model's
head (`classifier_from_token`, vLLM's name). The decoder is served as any other; its few numbers a text are multiplied
here, on the host."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder
from shardlm.models.pretrained import Pretrained
from shardlm.opened import Found
from shardlm.serve.classifier import Classifier
from shardlm.tokenizer import Tokenizer

SCORE, BIAS, HEAD, EMBEDDING = "score.weight", "score.bias", "lm_head.weight", "model.embed_tokens.weight"
FROM_TOKEN, ORIGINAL_RERANKER = "classifier_from_token", "is_original_qwen3_reranker"
_ACTIVATIONS = ("sbert_ce_default_activation_function", "sentence_transformers")
_OWN = (FROM_TOKEN, ORIGINAL_RERANKER, *_ACTIVATIONS, "num_labels", "method")  # no decoder's options
_KINDS = ("regression", "single_label_classification", "multi_label_classification")


def classifies(options: Mapping[str, Any]) -> bool:
    """Whether a config.json is one's."""
    names = options.get("architectures") or ()
    return bool(options.get(FROM_TOKEN)) or any(str(name).endswith("ForSequenceClassification") for name in names)


def apart(found: Found) -> tuple[Found, Classifier | None]:
    """(the decoder that a path names, its classifier; None: it has none). Raises ShardlmError for one that cannot be
    read."""
    source = found.source
    if found.run or not isinstance(source, Pretrained) or not classifies(source.options):
        return found, None
    if found.adapters:
        raise ShardlmError(f"{found.adapters}: adapters of a model that classifies are not served; merge them into it")
    options, tensors = source.options, Folder.open(source.folder).tensors
    read = _rows_of_tokens if options.get(FROM_TOKEN) else _score
    weight, bias = read(options, tensors, found)
    plain = {name: value for name, value in options.items() if name not in _OWN}
    if HEAD not in tensors:  # nothing is written: the embedding stands in for a head
        plain["tie_word_embeddings"] = True
    decoder = dataclasses.replace(source, config=json.dumps(plain))
    found = dataclasses.replace(found, source=decoder, beside=frozenset((SCORE, BIAS)))
    names = options.get("id2label") or {}
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(len(weight)))
    return found, Classifier(weight, bias, labels, _activation(options, len(weight)))


def _score(options: Mapping[str, Any], tensors: Mapping[str, Any], found: Found) -> tuple[np.ndarray, np.ndarray]:
    width = options.get("hidden_size")
    shape = tensors[SCORE].shape if SCORE in tensors else None
    if shape is None or len(shape) != 2 or shape[1] != width:
        is_there = "is missing" if shape is None else f"is {list(shape)} and the model needs [labels, {width}]"
        raise ShardlmError(
            f"{found.folder} says that it classifies (architectures={options.get('architectures')}), and {SCORE} "
            f"{is_there}; models with other heads are not served"
        )
    weight = _float32(tensors[SCORE].read(...))
    return weight, _float32(tensors[BIAS].read(...)) if BIAS in tensors else np.zeros(len(weight), np.float32)


def _rows_of_tokens(
    options: Mapping[str, Any], tensors: Mapping[str, Any], found: Found
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the language model's head: of each token or, of Qwen3-Reranker as it is published, how much more the
    second is said than the first, whose sigmoid is the softmax of both."""
    name = HEAD if HEAD in tensors else EMBEDDING
    if name not in tensors:
        raise ShardlmError(f"{found.folder} has {FROM_TOKEN}, and no {HEAD} or {EMBEDDING} to take its rows from")
    tokens, size, vocabulary = options[FROM_TOKEN], tensors[name].shape[0], Tokenizer.load(found.folder).vocabulary
    if not isinstance(tokens, list) or not all(vocabulary.get(str(token), size) < size for token in tokens):
        raise ShardlmError(
            f"config.json has {FROM_TOKEN}={tokens!r}; it is a list of tokens of the vocabulary of {size}"
        )
    ids = [vocabulary[str(token)] for token in tokens]
    rows = np.concatenate([_float32(tensors[name].read((slice(id, id + 1), slice(None)))) for id in ids])
    if options.get(ORIGINAL_RERANKER):
        if len(ids) != 2:
            message = f"config.json has {ORIGINAL_RERANKER} and {len(ids)} tokens; it needs those of no and yes"
            raise ShardlmError(message)
        rows = rows[1:] - rows[:1]
    return rows, np.zeros(len(rows), np.float32)


def _activation(options: Mapping[str, Any], classes: int) -> str:
    """As vLLM chooses it: what sentence-transformers wrote, else by the kind of the problem."""
    told = (options.get("sentence_transformers") or {}).get("activation_fn") or options.get(_ACTIVATIONS[0])
    if told:
        known = {"Sigmoid": "sigmoid", "Identity": "", "Softmax": "softmax"}
        if (name := str(told).rpartition(".")[2]) not in known:
            raise ShardlmError(f"config.json has the activation {told!r} of its scores; known are {', '.join(known)}")
        return known[name]
    kind = options.get("problem_type")
    if kind not in (None, *_KINDS):
        raise ShardlmError(f"config.json has problem_type={kind!r}; known are {', '.join(_KINDS)}")
    if kind == "regression":
        return ""
    return "sigmoid" if kind == "multi_label_classification" or classes == 1 else "softmax"


def _float32(a: np.ndarray) -> np.ndarray:
    return np.asarray(a, np.float32)
