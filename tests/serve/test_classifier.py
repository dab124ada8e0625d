"""Models that classify: their numbers against the logits that transformers recorded, of which a head whose rows are
rows of the language model's makes some; by hand against transformers' Qwen3ForSequenceClassification and Llama's, 1 and
3 labels, tied and not: 4e-6 of 9."""

import asyncio
import json
import pathlib

import httpx2
import numpy as np
import pytest
from engines import TOKENIZER, decoding_from

import shardlm
from shardlm import hf_files
from shardlm.errors import ShardlmError
from shardlm.hf_files import Planned, write_folder
from shardlm.opened import describe
from shardlm.serve.api.app import make_app
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.classifier import Classifier
from shardlm.serve.classifier_files import apart

QWEN = pathlib.Path(__file__).parent.parent / "hf" / "references" / "qwen3"
ROWS = [5, 9, 11]
CONFIG = {**json.loads((QWEN / "config.json").read_text()), "architectures": ["Qwen3ForSequenceClassification"]}
SIZES = {"max_model_len": 56, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8, "decode_steps": 4}


def folder_of(path, *, rows=ROWS, config=(), headless=True):
    """The reference with `rows` of its head as a classifier's, without its own unless told."""
    arrays = {name: stored.read(...) for name, stored in hf_files.Folder.open(QWEN).tensors.items()}
    if rows:
        arrays["score.weight"] = arrays["lm_head.weight"][rows]
    if headless:
        del arrays["lm_head.weight"]
    tensors = [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in arrays.items()]
    write_folder(path, tensors, CONFIG | dict(config))
    TOKENIZER.save(path / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    names = {"id2label": {"0": "bad", "1": "good"}}
    with decoding_from(2):
        return shardlm.LLM(folder_of(tmp_path_factory.mktemp("c") / "m", config=names), dtype="float32", **SIZES)


@pytest.fixture(scope="module")
def recorded():
    """(prompts, logits float32 [prompts, V] of their last tokens)."""
    stored = hf_files.header(QWEN / "expected.safetensors.reference")
    tokens, logits = stored["tokens"].read(...), stored["logits"].read(...)
    return [row[:n].tolist() for row, n in zip(tokens, (24, 17), strict=True)], np.stack([logits[0, 23], logits[1, 16]])


def test_classes_are_those_of_the_head(served, recorded):
    prompts, logits = recorded
    np.testing.assert_allclose(served.classify(prompts, use_activation=False), logits[:, ROWS], atol=1e-4)
    odds = np.exp(logits[:, ROWS])
    np.testing.assert_allclose(served.classify(prompts), odds / odds.sum(axis=1, keepdims=True), atol=1e-4)
    assert len(served.embed(prompts)[0]) == CONFIG["hidden_size"]
    with pytest.raises(ShardlmError, match="this model classifies texts and writes none"):
        served.generate([prompts[0]])
    assert not served.engine.has_unfinished


def test_over_http(served, recorded):
    prompts, logits = recorded
    llm = AsyncLLM(served.engine, model_name="m", template=None)
    app = make_app(llm)

    async def ask(path, body):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            answer = await client.post(path, content=json.dumps(body))
            return answer.status_code, answer.json()

    async def scenario():
        _, body = await ask("/classify", {"input": prompts})
        assert body["id"].startswith("classify-") and body["usage"]["prompt_tokens"] == 24 + 17
        for one, row in zip(body["data"], logits[:, ROWS], strict=True):
            assert one["label"] == ("bad", "good", "LABEL_2")[int(np.argmax(row))] and one["num_classes"] == 3
            assert sum(one["probs"]) == pytest.approx(1)
        for path, wish in (("/classify", {"activation": False}), ("/pooling", {"use_activation": False})):
            _, raw = await ask(path, {"input": prompts[0], **wish})
            found = raw["data"][0].get("probs") or raw["data"][0]["data"]
            np.testing.assert_allclose(found, logits[0, ROWS], atol=1e-4)
        _, vector = await ask("/pooling", {"input": prompts[0], "task": "embed"})
        assert vector["data"][0]["object"] == "pooling" and len(vector["data"][0]["data"]) == CONFIG["hidden_size"]
        for path, wrong, message in (
            ("/pooling", {"input": "a", "task": "token_embed"}, "task='token_embed' must be embed or classify"),
            ("/pooling", {"input": "a", "dimensions": 2}, "dimensions and encoding_format are of embeddings"),
            ("/v1/completions", {"prompt": "a"}, "this model classifies texts and writes none"),
            ("/score", {"text_1": "a", "text_2": "b"}, "this model tells 3 classes of a text"),
        ):
            status, body = await ask(path, wrong)
            assert status == 400 and message in body["error"]["message"]

    asyncio.run(scenario())
    llm.shutdown()


def test_a_reranker_s_two_tokens_are_one_number(tmp_path):
    no, yes = 20, 30
    names = {id: name for name, id in TOKENIZER.vocabulary.items()}
    told = {"classifier_from_token": [names[no], names[yes]]}
    head = hf_files.Folder.open(QWEN).tensors["lm_head.weight"].read(...).astype(np.float32)
    for name, extra in (("published", {"is_original_qwen3_reranker": True}), ("rows", {})):
        folder = folder_of(tmp_path / name, rows=None, headless=False, config={**told, **extra})
        found, classifier = apart(describe(folder))
        assert not found.source.transformer().tie_embeddings
        wanted = head[[no, yes]] if name == "rows" else head[[yes]] - head[[no]]
        np.testing.assert_array_equal(classifier.weight, wanted)
        assert classifier.activation == ("softmax" if name == "rows" else "sigmoid")


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"problem_type": "regression"}, ""),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ""),
        ({"problem_type": "ordinal"}, "config.json has problem_type='ordinal'; known are regression"),
        ({"sbert_ce_default_activation_function": "torch.nn.GELU"}, "activation 'torch.nn.GELU' of its scores; known"),
        ({"classifier_from_token": ["no such token"]}, "it is a list of tokens of the vocabulary of 96"),
        ({"classifier_from_token": [TOKENIZER.texts([200])[0]]}, "it is a list of tokens of the vocabulary of 96"),
        ({"hidden_size": 64}, r"score.weight is [3, 32] and the model needs [labels, 64]"),
    ],
)
def test_what_its_configuration_says(tmp_path, config, activation):
    folder = folder_of(tmp_path / "m", config=config)
    if len(activation) < 8:
        found, classifier = apart(describe(folder))
        assert classifier.activation == activation and found.source.transformer().tie_embeddings
        return
    with pytest.raises(ShardlmError) as error:
        apart(describe(folder))
    assert activation in str(error.value)


def test_probabilities():
    one = Classifier(np.array([[1.0, -2.0]], np.float32), np.array([0.5], np.float32), ("x",), "sigmoid")
    hidden = np.array([1.0, 1.0], np.float32)
    assert one.classes(hidden) == [pytest.approx(1 / (1 + np.exp(0.5)))] and one.classes(hidden, False) == [-0.5]
