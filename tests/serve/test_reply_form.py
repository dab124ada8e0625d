"""Replies whose first part is free: what follows it satisfies the grammar, wherever tokens are cut."""

import numpy as np
import pytest
from engines import END, TOKENIZER, finished, random_engine

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.serve.reply_form import FormCompiler, FreePart
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs

VOCAB = TOKENIZER.vocab_size + 4
COMPILER = FormCompiler(TOKENIZER, VOCAB, [END])
TEXTS = TOKENIZER.token_texts()
CHOICES = ["true", "ags", "12,"]
FREE = {  # name: (fields, what of a whole text is held to the choices; None: it is not there yet)
    "after": ({"after": "a"}, None),
    "after two": (
        {"after": ("na", '"')},
        lambda text: text.partition("na")[2].partition('"')[2] if '"' in text.partition("na")[2] else None,
    ),
    "opening": ({"after": "g", "opening": '{"'}, None),
    "opening of three tokens": ({"after": "}", "opening": "x y"}, None),
    "instead": ({"instead": '{"'}, lambda text: text),
    "after, instead": (
        {"after": "a", "instead": ("{", "n")},
        lambda text: text.partition("a")[2] if "a" in text else None,
    ),
    "opening, instead": ({"after": "g", "opening": '{"', "instead": "x"}, None),
}


def answer(name: str, text: str) -> str | None:
    """What is held; None: nothing yet, or ever."""
    fields, held = FREE[name]
    said = held(text) if held else _opened(fields, text) if "opening" in fields else _after(fields["after"], text)
    return None if said is not None and said.lstrip().startswith(tuple(fields.get("instead", "\0"))) else said


def _after(mark: str, text: str) -> str | None:
    return text.partition(mark)[2] if mark in text else None


def _opened(fields, text: str) -> str | None:
    if text.lstrip().startswith(fields["opening"]):
        free = text.lstrip()[len(fields["opening"]) :]
        return free.partition(fields["after"])[2] if fields["after"] in free else None
    return text


def walk(form, rng, pull: str) -> tuple[str, bool]:
    """(a random text under the form's masks, whether the form says it is whole); tokens of `pull` are likelier."""
    stream, text = TOKENIZER.stream(), ""
    for _ in range(60):
        masks = np.full((1, -(-VOCAB // 32)), -1, np.int32)
        COMPILER.fill(masks, [(0, form)])
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size]
        bits[END] = 0  # a reply may end in its free part; here none does
        some = np.flatnonzero(bits)
        near = [token for token in some if TEXTS[token].strip() and TEXTS[token] in pull]
        assert len(some), text
        token = int(rng.choice(near if near and rng.random() < 0.5 else some))
        piece = stream.step(token)
        text += piece
        assert form.read([token], [piece]) == 1
        if form.complete:
            return text, True
    return text, False


@pytest.mark.parametrize("name", FREE)
def test_what_follows_the_free_part_is_of_the_grammar(name):
    fields, rng, ended, began, freed = FREE[name][0], np.random.default_rng(0), 0, 0, 0
    wish = StructuredOutputs(choice=CHOICES, **fields)
    pull = "".join((*wish.after, wish.opening, *wish.instead))
    for seed in range(60):
        form = COMPILER.wanted(wish)
        text, whole = walk(form.copy() if seed % 2 else form, rng, pull)
        said = answer(name, text)
        assert (said in CHOICES) == whole and (whole or said is None or any(c.startswith(said) for c in CHOICES)), text
        ended += whole
        began += bool(wish.opening) and text.lstrip().startswith(wish.opening)
        freed += bool(wish.instead) and said is None and (not wish.after or wish.after[0] in text)
    assert ended > (5 if wish.instead else 10) and (not wish.opening or 5 < began < 55)
    assert not wish.instead or 5 < freed < 55


def test_tokens_that_would_end_the_free_part_and_go_on_are_forbidden():
    """And those that would end the reply, which what is asked for is still to follow."""
    form = COMPILER.wanted(StructuredOutputs(choice=CHOICES, after="na"))
    end = TEXTS[TOKENIZER.end_of_document_id]

    def forbidden() -> set[str]:
        mask = np.full(-(-VOCAB // 32), -1, np.int32)
        form.adjust(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size]
        return {TEXTS[token] for token in np.flatnonzero(bits == 0)}

    assert forbidden() == {end, "nam", "name"}
    form.read(TOKENIZER.encode("n"), ["n"])
    assert forbidden() == {end, "nam", "name", "ab", "ag", "am", "age"}
    form.read(TOKENIZER.encode("x"), ["x"])
    assert forbidden() == {end, "nam", "name"}


def test_engines_hold_replies_from_there_on():
    engine, *_ = random_engine(MeshSpec(), rows=10, tokens=32, pages=300, least=10)
    bias = {TOKENIZER.encode("a")[0]: 4.0}
    for name in ("after", "opening", "opening, instead"):
        wish = StructuredOutputs(choice=CHOICES, **FREE[name][0])
        params = SamplingParams(
            n=3, max_tokens=40, temperature=1.5, logit_bias=bias, structured_outputs=wish, seed=3, logprobs=1
        )
        engine.add(name, [5, 6, 7], params)
    ended = 0
    for name, output in finished(engine).items():
        for reply in output.outputs:
            said = answer(name, reply.text)
            held = said in CHOICES
            freed = name.endswith("instead") and said is None
            assert held or reply.finish_reason == "length" or (freed and reply.finish_reason == "stop")
            ended += held
    assert ended >= 3


def test_what_is_refused():
    for fields, message in (
        ({"after": ("a", "")}, "empty text"),
        ({"after": (1,)}, "a list of texts"),
        ({"opening": "<"}, "beside `after`"),
        ({"opening": 3, "after": "a"}, "opening=3 must be a text"),
    ):
        with pytest.raises(ShardlmError, match=message):
            StructuredOutputs(regex="a", **fields)


def test_no_token_that_goes_on_is_overlooked():
    """Against following every token from every place."""
    rng = np.random.default_rng(1)
    texts = ["".join(rng.choice(list("aab"), rng.integers(0, 7))) for _ in range(3000)]
    for after in (("aabaa",), ("a",), ("ab", "ba"), ("aa", "a")):
        free, places = FreePart(texts, after), 0
        for number, text in enumerate(after):
            for matched in range(len(text)):
                place, places = (number, matched), places + 1
                slow = [id for id, one in enumerate(texts) if one and free.follow(place, one[:-1])[1] is not None]
                assert free.beyond(place).tolist() == slow
        assert places == sum(map(len, after))
