"""Prompts with images out of JSONL: the tokens that a server makes of the same messages, the images in the rows, and
what is refused."""

import json

import numpy as np
import pytest
from seen_chats import PAD, PARTS, PLACE, WHOLE, data_url, png, said, sight, tokenizer

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.reinforce.prompts import Order, digest, may_show, read
from shardlm.reinforce.rows import Reply, images_of, rows_of
from shardlm.serve.images import Given, Images
from shardlm.serve.messages import rendered
from shardlm.vision.axes import axes_of
from shardlm.vision.image_places import encoded
from shardlm.vision.read import pixels_of

TEMPLATE, ASK = ChatTemplate(PARTS, where="the template"), "the quick fox?"
A, B = png(), png(16, 32, 1)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.png").write_bytes(A)
    (tmp_path / "b.png").write_bytes(B)
    return tmp_path


def prompts(folder, *lines, longest=64, own=None, template=TEMPLATE):
    path = folder / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return read((str(path),), tokenizer(), template, longest, "data.train", own or sight())


def served(messages, images):
    """(tokens, where images are) of a request with the same messages."""
    how, token = Images(sight(), tokenizer()), PAD
    ids = encoded(rendered(TEMPLATE, messages, None, token=token), token, tokenizer(), tokenizer().encode)
    return how.read(ids, Given(images), 64)


def test_every_form_of_line_is_the_prompt_that_a_server_makes(folder):
    shown = [said("user", PLACE, ASK)]
    ids, placed = served(shown, [A])
    found = prompts(
        folder,
        {"prompt": shown, "images": ["a.png"], "answer": 3},
        {"prompt": shown, "image": "a.png"},
        {"prompt": [said("user", ASK)], "images": ["a.png"]},  # TRL's
        {"prompt": [said("user", f"<image>{ASK}")], "images": [data_url(A)]},
        {"prompt": [said("user", {"type": "image", "path": "a.png"}, ASK)]},
        {"prompt": tokenizer().decode(ids, skip_special=False).replace(f"{PAD * 3}<|row|>" * 2, PAD), "image": "a.png"},
    )
    for one in found:
        assert list(one.tokens) == ids
        [image] = one.images
        assert (image.place.start, image.place.end) == (placed[0].start, placed[0].end)
        assert (image.place.takes == placed[0].takes).all() and image.patches == 6
        assert one.asked["multi_modal_data"] == {"image": [A]}
        assert sight().expanded(one.asked["prompt_token_ids"], [placed[0].picture])[0] == ids
    # What rewards are given is what the line has, as TRL gives them its columns.
    assert found[0].columns == {"images": ["a.png"], "answer": 3} and found[0].given == shown


def test_what_sees_is_asked_for_by_lines_that_may_show_something(folder):
    files = {"text.jsonl": {"prompt": "fox"}, "part.jsonl": {"prompt": [said("user", PLACE)], "image": "a.png"}}
    for name, line in files.items():
        (folder / name).write_text(json.dumps(line) + "\n")
    assert [may_show([str(folder / name)]) for name in files] == [False, True]
    assert may_show([str(folder / name) for name in files])


def test_lines_without_images_stay_as_they_are(folder):
    chat = {"prompt": [said("user", "the <image> dog")]}
    [plain], [seen] = (prompts(folder, chat, own=own) for own in (None, sight()))
    assert plain == seen and not seen.images and seen.asked == {"prompt_token_ids": list(seen.tokens)}


def test_another_image_is_another_prompt(folder):
    line = {"prompt": [said("user", PLACE, ASK)], "images": ["a.png"]}
    before = prompts(folder, line)
    [again] = prompts(folder, line)
    assert digest([again]) == digest(before) and Order((again,), 0).fingerprint == Order(before, 0).fingerprint
    (folder / "a.png").write_bytes(png(seed=7))
    after = prompts(folder, line)
    assert after[0].tokens == before[0].tokens and digest(after) != digest(before)
    assert Order(after, 0).fingerprint != Order(before, 0).fingerprint
    with pytest.raises(ShardlmError, match=r"p\.jsonl:1: a\.png is another image than when the run began"):
        before[0].asked  # noqa: B018
    (folder / "a.png").unlink()
    with pytest.raises(ShardlmError, match=r"p\.jsonl:1: a\.png: there is no file"):
        before[0].images[0].file()


@pytest.mark.parametrize("axes", [False, True])
def test_rows_hold_the_images_of_every_reply(folder, axes):
    own = sight(axes)
    lines = [
        {"prompt": [said("user", PLACE, ASK)], "images": ["a.png"]},
        {"prompt": [said("user", ASK)]},
        {"prompt": [said("user", PLACE, "fox", PLACE)], "images": ["b.png", "a.png"]},
    ]
    replies = [
        Reply(prompt.tokens, (300,) * (3 + i), (-0.5,) * (3 + i), 0.5, True, prompt.images)
        for prompt in prompts(folder, *lines, own=own)
        for i in range(2)
    ]
    sizes = 6, 128, 2
    batch = rows_of(replies, *sizes, "dapo", axes)
    images = images_of(replies, *sizes, lambda file: own.prepare(pixels_of(file)))
    assert len(images) == 6 and len({image.same for image in images}) == 2
    pads = batch["tokens"] == tokenizer().vocabulary[PAD]
    taken = np.zeros_like(pads)
    for image in images:
        assert not taken[image.row, image.takes].any() and image.picture().patches == image.patches == len(image.takes)
        taken[image.row, image.takes] = True
    assert (taken == pads).all()
    assert ("turns" in batch) == axes
    if axes:
        for row in range(6):
            for segment in range(1, batch["segment_ids"][row].max() + 1):
                at = batch["segment_ids"][row] == segment
                tokens = batch["tokens"][row, at].tolist()
                [reply] = {r.prompt: r for r in replies if tokens[: len(r.prompt)] == list(r.prompt)}.values()
                places = [image.place for image in reply.images]
                assert (batch["turns"][row, at] == axes_of(len(tokens), places)[0].T).all()
        assert not batch["turns"][batch["segment_ids"] == 0].any()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": "the fox", "images": ["a.png"]},
            r"p\.jsonl:1 \(prompt\): .*places for 0 images and comes with 1.*in a text <.image_pad.> stands",
        ),
        ({"prompt": f"{WHOLE} fox"}, r"p\.jsonl:1 \(prompt\): .*places for 1 images and comes with 0"),
        ({"prompt": [said("user", PLACE)]}, r"p\.jsonl:1 \(prompt\) has 0 images and 1 places"),
        ({"prompt": [said("user", ASK)], "images": ["c.png"]}, r"p\.jsonl:1: image 1 of 1, c\.png: there is no file"),
        ({"prompt": [said("user", ASK)], "images": ["a.png"] * 9}, r"grpo.max_tokens to less, data.max_pixels to less"),
    ],
)
def test_what_is_refused(folder, line, message):
    with pytest.raises(ShardlmError, match=message):
        prompts(folder, line)


def test_a_model_that_reads_text_has_none(folder):
    (folder / "p.jsonl").write_text(json.dumps({"prompt": [said("user", ASK)], "images": ["a.png"]}))
    with pytest.raises(ShardlmError, match=r"p\.jsonl:1 has images, and the checkpoint's model reads text: leave them"):
        read((str(folder / "p.jsonl"),), tokenizer(), TEMPLATE, 64, "data.train")
