"""Conversations with images as training data: every form of line gives the same document, which is what a server makes
of the same messages; what is learned of it; and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_chats import (
    LISTS,
    PAD,
    PARTS,
    PLACE,
    ROW,
    WHOLE,
    WORDS,
    chats,
    data_url,
    png,
    said,
    shards_of,
    sight,
    tokenizer,
)

from shardlm.data.chats import conversation
from shardlm.data.rendering import Chats, _expanded
from shardlm.errors import ShardlmError
from shardlm.serve.images import Given, Images
from shardlm.serve.messages import rendered
from shardlm.tokenizer import train_bpe
from shardlm.vision.image_places import encoded
from shardlm.vision.picture import Picture

A, B = png(), png(16, 32, 1)
ASK, ANSWER = "the quick fox?", "the lazy dog"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(A)
    (tmp_path / "images" / "b.png").write_bytes(B)
    return tmp_path


def document(line, folder, source=PARTS, own=None):
    [found] = conversation(json.loads(json.dumps(line)), "chats.jsonl:1", chats(source, own, folder))
    return found


def same(one, other):
    assert one.ids.tolist() == other.ids.tolist() and one.learned.tolist() == other.learned.tolist()
    assert one.images == other.images and one.num_bytes == other.num_bytes


def of(*messages, **more):
    return {"messages": list(messages), **more}


def answer():
    return said("assistant", ANSWER)


def shape(count):
    """(image token, row token) of so many columns."""
    return f"{PAD * count}{ROW}"


def forms(folder):
    """Of one image before the words."""
    path = str(folder / "images" / "a.png")
    values = [{"type": "image", name: "images/a.png"} for name in ("image", "url", "path")]
    values += [{"type": kind, "image_url": {"url": data_url(A)}} for kind in ("image_url", "input_image")]
    values += [{"type": "image_url", "image_url": (folder / "images" / "a.png").as_uri()}]
    values += [{"type": "image", "image": path}, {"type": "image", "base64": data_url(A).partition(",")[2]}]
    values += [{"type": "image", "image": {"path": "images/a.png", "bytes": None}}]
    yield from (of(said("user", value, ASK), answer()) for value in values)
    nulls = [{"type": "image", "text": None, "image": None}, {"type": "text", "text": ASK}]
    for images in (
        {"images": ["images/a.png"]},
        {"image": "images/a.png"},
        {"images": [{"path": path}], "image": None},
    ):
        yield of({"role": "user", "content": nulls}, said("assistant", ANSWER), **images)
        yield of(said("user", ASK), answer(), **images)  # TRL's, before what the user says first
        yield of(said("user", f"<image>{ASK}"), answer(), **images)  # LLaMA-Factory's
        yield of(said("user", [f"<image>{ASK}"][0]), answer(), **images)
        yield {"prompt": [said("user", PLACE, ASK)], "completion": [answer()], **images}
        yield {"prompt": ASK, "completion": ANSWER, **images}
        yield {
            "conversations": [{"from": "human", "value": f"<image>\n{ASK}"}, {"from": "gpt", "value": ANSWER}]
        } | images


def test_every_form_of_line_is_the_same_document(folder):
    every = [document(line, folder) for line in forms(folder)]
    assert len(every) > 20
    for other in every:
        same(other, every[0])
    [image] = every[0].images
    text = tokenizer().decode(every[0].ids.tolist(), skip_special=False)
    assert text.startswith(f"<|im_start|>user\n<|vision_start|>{shape(3) * 2}<|vision_end|>{ASK}<|im_end|>")
    assert image.file == A and (image.grid, image.patches) == ((2, 3), 6)
    assert tokenizer().decode(every[0].ids[image.first : image.end].tolist(), skip_special=False) == shape(3) * 2


@pytest.mark.parametrize("source", [PARTS, LISTS, WORDS])
def test_images_in_the_order_of_their_places(folder, source):
    """Also in templates that go through parts alone, or join contents to other texts."""
    messages = [said("user", PLACE, "fox ", PLACE), answer(), said("user", "dog?", PLACE), answer()]
    found = document(of(*messages, images=["images/a.png", "images/b.png", "images/a.png"]), folder, source)
    own = {"type": "image", "path": "images/b.png"}
    mixed = [said("user", PLACE, "fox ", own), *messages[1:]]
    same(found, document(of(*mixed, images=["images/a.png", "images/a.png"]), folder, source))
    assert [image.file for image in found.images] == [A, B, A]
    assert [image.end - image.first for image in found.images] == [8, 3, 8]
    learned = tokenizer().decode(found.ids[found.learned].tolist(), skip_special=False)
    assert learned.count(ANSWER) == 2 and not learned.replace(ANSWER, "").replace("<|im_end|>", "").strip()


def test_llava_and_llama_factory_spread_over_turns(folder):
    images = ["images/a.png", "images/b.png"]
    turns = [("human", "<image>\n<image>\nfox"), ("gpt", ANSWER)], [("human", "fox\n<image>"), ("gpt", "<image>dog")]
    first, second = ({"images": images, "conversations": [{"from": r, "value": v} for r, v in one]} for one in turns)
    same(document(first, folder), document(of(said("user", PLACE, PLACE, "fox"), answer(), images=images), folder))
    expected = of(said("user", "fox", PLACE), said("assistant", PLACE, "dog"), images=images)
    same(document(second, folder), document(expected, folder))
    kept = of(said("user", "<image>\nfox"), answer(), images=images[:1])  # as it stands
    same(document(kept, folder), document(of(said("user", PLACE, "\nfox"), answer(), images=images[:1]), folder))


def test_tokens_of_images_are_never_learned(folder):
    """In the assistant's turn neither, nor what the template writes around them."""
    line = of(said("user", ASK), said("assistant", "the ", PLACE, "fox", PLACE, PLACE), images=["images/a.png"] * 3)
    found = document(line, folder)
    for image in found.images:
        assert not found.learned[image.first - 1 : image.end + 1].any()
    assert tokenizer().decode(found.ids[found.learned].tolist(), skip_special=False) == "the fox<|im_end|>\n"


def test_names_in_words_are_words(folder):
    """The model's own name of an image as it is spelt, and <image> in a line without images or with parts."""
    line = of(
        said("user", PLACE, f"{PAD}<image> fox{PAD}"), said("assistant", f"dog{PAD} <image>"), images=["images/b.png"]
    )
    found = document(line, folder)
    pad = tokenizer().vocabulary[PAD]
    [image] = found.images
    assert np.flatnonzero(found.ids == pad).tolist() == [image.first, image.first + 1]
    text = tokenizer().decode(found.ids.tolist(), skip_special=False)
    assert text.count(PAD) == 2 + 3 and text.count("<image>") == 2
    assert tokenizer().decode(found.ids[found.learned].tolist(), skip_special=False) == f"dog{PAD} <image><|im_end|>\n"
    text = document(of(said("user", f"<image>{PAD}"), answer(), images=[]), folder)
    assert not text.images and "<image>" in tokenizer().decode(text.ids.tolist()) and pad not in text.ids
    seen = of(said("user", "<image>fox"), answer())
    same(document(seen, folder), document(seen | {"image": ""}, folder))
    blind = Chats(chats().template, tokenizer())
    same(document(seen, folder), conversation(seen, "a:1", blind)[0])


@pytest.mark.parametrize("source", [PARTS, LISTS, WORDS])
def test_a_document_is_what_a_server_makes_of_the_conversation(folder, source):
    own, images = sight(), [A, B]
    messages = [
        said("system", f"quick {PAD}"),
        said("user", PLACE, f"see {PAD} ", PLACE, "fox"),
        answer(),
        said("user", "jumps"),
        said("assistant", "over", " the dog") if source != LISTS else answer(),
    ]
    found = document(of(*messages, images=["images/a.png", "images/b.png"]), folder, source)
    how = chats(source)
    text = rendered(how.template, messages, None, add_generation_prompt=False, token=PAD)
    ids = encoded(text, PAD, tokenizer(), tokenizer().encode)
    ids, placed = Images(own, tokenizer()).read(ids, Given(images), 10_000)
    assert found.ids.tolist() == [*ids, tokenizer().end_of_document_id]
    assert [(one.first, one.end) for one in found.images] == [(one.start, one.end) for one in placed]


@settings(deadline=None, max_examples=200)
@given(
    words=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    joined=st.sets(st.sampled_from(["first", "last"])),
    data=st.data(),
)
def test_marks_follow_their_tokens(words, joined, data):
    """Also where a picture's first token is one with what is before it, and its last with what is behind."""
    image, begin, end, vector = 1, 2, 3, 4
    lengths = [*words[:-1], words[-1]]
    numbers = iter(range(100, 1000))
    runs = [[next(numbers) for _ in range(length)] for length in lengths]
    ids = [id for i, run in enumerate(runs) for id in ([image] if i else []) + run]
    wrote = [id != image and data.draw(st.booleans()) for id in ids]
    beside = [*range(100, 1000), *range(10_000, 60_000)]
    joins = {(word, begin): 10_000 + word for word in beside} if "first" in joined else {}
    joins |= {(end, word): 30_000 + word for word in range(100, 1000)} if "last" in joined else {}
    own = dataclasses.replace(
        sight(), token=image, vector=vector, tokens=lambda picture: [begin, vector, vector, end], joins=joins
    )
    pictures = [Picture({"a": np.zeros((2, 1))}, (1, 2), b"")] * (len(words) - 1)
    big = dataclasses.make_dataclass("Many", ["vocab_size"])(10**6)
    found, learned, placed = _expanded(ids, wrote, pictures, Chats(None, big, own))
    marks = dict(zip(ids, wrote, strict=True))
    inside = {place for one in placed for place in range(one.start, one.end)}
    assert learned == [place not in inside and marks.get(id, False) for place, id in enumerate(found)]


@pytest.mark.parametrize(
    "line,message",
    [
        (of(said("user", {"type": "image", "path": "no.png"}), answer()),
         r"image 1 of 1, no\.png: there is no file .*no\.png; paths are relative to the folder of the JSONL"),
        (of(said("user", PLACE, PLACE), answer(), images=["images/a.png", "images/text.png"]),
         r"image 2 of 2, images/text\.png: an image's file is .* none of PNG"),
        (of(said("user", {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}), answer()),
         r"image 1 of 1, https://example\.com/a\.png: images are read from files: download it first"),
        (of(said("user", PLACE), answer(), images=["s3://bucket/a.png"]), "download it first"),
        (of(said("user", PLACE), answer(), images=["images"]), "there is no file"),
        (of(said("user", PLACE), answer(), images=["data:image/png;base64,!"]), "not in base64"),
        (of(said("user", PLACE), answer(), images=["images/small.png"]), "it has 16 of a side"),
        (of(said("user", PLACE), answer(), images=["images/large.png"]), "has 1040 patches, and at most 1024 are read"),
        (of(said("user", PLACE, PLACE), answer(), images=["images/a.png"]), "has 1 images and 2 places for them; give"),
        (of(said("user", PLACE), answer(), images=["images/a.png"] * 2), "has 2 images and 1 places for them"),
        (of(said("user", PLACE), answer()), "has 0 images and 1 places"),
        (of(said("user", "<image>fox<image>"), answer(), images=["images/a.png"]), "has 1 images and 2 places"),
        (of(answer(), images=["images/a.png"]), "has 1 images, no place for them and no message of role user"),
        (of({"role": "user", "content": 3}, answer(), images=["images/a.png"]), "of message 0 is 3; it is a text"),
        (of(said("user", PLACE), answer(), images=[3]), r"images\[0\] is 3; an image is a file's path"),
        (of(said("user", PLACE), answer(), images=[{"bytes": "a"}]), r"images\[0\] is \{.*; an image is a file's path"),
        (of(said("user", PLACE), answer(), images=["a"], image="b"), "has both image and images"),
        (of(said("user", {"type": "image", "image": 3}), answer()), r"messages\[0\].content\[0\] is 3; an image is"),
        (of(said("user", {"type": "image_url", "image_url": {"url": ["a"]}}), answer()), "an image is a file's path"),
        (of(said("user", PLACE, {"type": "audio"}), answer(), images=["images/a.png"]),
         r"messages\[0\].content\[1\] is of type 'audio'; this model reads text and images"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_named(folder, line, message):
    (folder / "images" / "text.png").write_text("fox")
    (folder / "images" / "small.png").write_bytes(png(8, 8))
    (folder / "images" / "large.png").write_bytes(png(16 * 26, 16 * 40))
    whole, seen = of(said("user", "fox"), answer()), of(said("user", PLACE), answer(), images=["images/a.png"])
    with pytest.raises(ShardlmError, match=rf"chats\.jsonl:2.*{message}"):
        shards_of([seen, line, *[whole] * 40], folder, sight())
    assert not list((folder / "chats-shards").glob("*"))


def test_models_that_read_text_are_not_shown_images(folder):
    blind = Chats(chats().template, tokenizer(), folder=folder)
    for line in forms(folder):
        with pytest.raises(
            ShardlmError, match=r"a:1 has images, and data\.chat_template \(the template\) is of no model"
        ):
            conversation(line, "a:1", blind)


def test_a_tokenizer_of_another_model_is_refused(folder):
    other = Chats(chats().template, train_bpe([], 300), sight(), folder)
    line = of(said("user", PLACE), answer(), images=["images/a.png"])
    with pytest.raises(
        ShardlmError, match=r"has the token 1 for an image, and .* set data\.tokenizer to the same folder"
    ):
        conversation(line, "a:1", other)


def test_a_template_that_writes_no_place_is_told(folder):
    hidden = "{% for m in messages %}{{ m.role }}{% generation %}fox{% endgeneration %}{% endfor %}"
    line = of(said("user", PLACE), answer(), images=["images/a.png"])
    with pytest.raises(ShardlmError, match=r"the template writes places for 0 images .*, and the messages have 1"):
        document(line, folder, hidden)
    assert WHOLE in PARTS
