"""Small checkpoints that see, opened as users do, and what transformers says to the same prompts and images."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import references
import tokenizers
from tokenizers import models, pre_tokenizers

from shardlm import LLM, SamplingParams
from shardlm.serve.outputs import RequestOutput
from shardlm.vision.picture import Clip
from shardlm.vision.video import video_of_frames

SIZES = {"max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 4, "decode_steps": 4}


Film = tuple[np.ndarray, float]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder."""

    folder: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Family:
    """A model of transformers in a folder. inputs: what it is called with beside the tokens, of images, them, and
    videos where there are some."""

    folder: pathlib.Path
    model: Any
    inputs: Callable[..., dict[str, Any]]


def with_tokenizer(folder: pathlib.Path, vocab_size: int, special: dict[str, int]) -> None:
    """A tokenizer of words t0, t1, ... and of special tokens."""
    vocab = {f"t{i}": i for i in range(vocab_size) if i not in special.values()} | special
    own = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special])
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def drawn(model: Any, seed: int = 0) -> Any:
    """With weights that make replies of many tokens, and norms that prove something."""
    import torch

    torch.manual_seed(seed)
    for name, param in model.named_parameters():
        if param.ndim > 1:
            torch.nn.init.normal_(param, 0, param.shape[-1] ** -0.5)
        elif "norm" in name:
            torch.nn.init.normal_(param, 1.0, 0.3)
        param.data = param.data.bfloat16().float()  # in half of the file (references.py)
    return model.eval()


@dataclasses.dataclass(frozen=True)
class Said:
    """The tokens of a reply, and the log-probability of each token of the prompt but the first."""

    reply: list[int]
    prompt: list[float]


def by_transformers(
    family: Family, ids: Sequence[int], images: Sequence[np.ndarray], count: int, *films: Sequence
) -> Said:
    """Greedy, every token from all before it."""
    import torch

    told, said = list(ids), None
    with torch.no_grad():
        for _ in range(count):
            given = family.inputs(images, told, *films)
            logits = family.model(input_ids=torch.tensor([told]), **given).logits[0].float()
            said = torch.log_softmax(logits, -1) if said is None else said
            told.append(int(logits[-1].argmax()))
    return Said(told[len(ids) :], [said[i, ids[i + 1]].item() for i in range(len(ids) - 1)])


# Tokens, images, and where there are some videos: frames and how many a second.
Ask = tuple[Sequence[int], Sequence[np.ndarray]] | tuple[Sequence[int], Sequence[np.ndarray], Sequence[Film]]


def asked(llm: LLM, asks: Sequence[Ask], count: int = 6, scored: bool = False, **params: Any) -> list[RequestOutput]:
    """The answers to prompts, in which the image token stands for an image and that of videos for one, all at once."""
    sight, engine, done = llm.engine.sight, llm.engine, {}
    params = {"temperature": 0, "max_tokens": count, "ignore_eos": True, **params}
    params |= {"prompt_logprobs": 0} if scored else {}
    for number, (ids, images, *films) in enumerate(asks):
        pictures = [sight.prepare(image) for image in images]
        clips = [clip_of(llm, film) for film in (films[0] if films else ())]
        ids, placed = sight.expanded(ids, pictures, clips)
        engine.add(str(number), ids, SamplingParams(**params), pictures=placed)
    while len(done) < len(asks):
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert not any(output.error for output in done.values())
    return [done[str(number)] for number in range(len(asks))]


def clip_of(llm: LLM, film: Film) -> Clip:
    """All of its frames."""
    own = video_of_frames(film[0], {"fps": film[1], "do_sample_frames": False})
    about = dataclasses.replace(own, chosen=range(own.count))
    return llm.engine.sight.videos.prepare(about).clip(llm.tokenizer.encode)


def replies(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Their tokens."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def held_to_transformers(family: Family, llm: LLM, asks: Sequence[Ask], count: int = 6, close: float = 1e-4) -> None:
    """Greedy replies, and log-probabilities of prompts."""
    outputs = asked(llm, asks, count, scored=True)
    pairs = zip(outputs, asks, strict=True)
    theirs = [
        by_transformers(family, output.prompt_token_ids, images, count, *films) for output, (_, images, *films) in pairs
    ]
    references.keep(family.folder, asks, [dataclasses.asdict(one) for one in theirs])
    same(outputs, theirs, close)


def same(outputs: Sequence[RequestOutput], theirs: Sequence[Said], close: float = 1e-4) -> None:
    """Replies, and log-probabilities of prompts, are these."""
    for output, one in zip(outputs, theirs, strict=True):
        ours = [place.chosen.logprob for place in output.prompt_logprobs[1:]]
        assert np.abs(np.array(ours) - np.array(one.prompt)).max() < close
        assert list(output.outputs[0].token_ids) == one.reply


# Log-probabilities of a checkpoint that moves more than others: half a unit in the last place of each weight changes
# what transformers itself says of it by up to 3.3e-4.
CLOSE = {"glm5_next": 1e-3}


def held_to_references(name: str, llm: LLM) -> None:
    """What transformers said by this checkpoint."""
    asks, said = references.asks(name), [Said(**one) for one in references.said(name)]
    same(asked(llm, asks, len(said[0].reply), scored=True), said, CLOSE.get(name, 1e-4))
