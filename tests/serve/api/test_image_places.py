"""Conversations with images, by templates of every kind: each image has one place, and texts have none."""

import pytest
from seeing_llm import LISTS, PAD, PARTS, TOOLS, WORDS, part, picture, text, tokenizer

from shardlm.chat import ChatTemplate
from shardlm.serve.messages import rendered
from shardlm.vision.image_parts import BadMessage, images_in
from shardlm.vision.image_places import NAMED, encoded, shown

WHOLE = f"<|vision_start|>{PAD}<|vision_end|>"
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def said(source, *messages, **options):
    return rendered(ChatTemplate(source), messages, None, token=PAD, **options)


def user(*parts):
    return {"role": "user", "content": list(parts)}


IMAGE = part(picture())


def test_parts_stay_where_they_are():
    found = said(PARTS, user(text("a "), IMAGE, text(" b "), IMAGE, text("?")))
    assert f"user\na {WHOLE} b {WHOLE}?<|im_end|>" in found
    assert f"Picture 1: {WHOLE}" in said(PARTS, user(IMAGE), options={"add_vision_id": True})
    for other in ({"type": "input_image", "image_url": "data:,"}, {"type": "image", "image": 3}):
        assert said(PARTS, user(other)) == said(PARTS, user(IMAGE))


def test_without_images_the_text_is_the_same_as_of_a_model_that_reads_text():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, user(text("c"), text("d"))]
    for source in (PARTS, TOOLS, WORDS):
        assert said(source, *messages) == rendered(ChatTemplate(source), messages, None)
    assert said(LISTS, *messages) == "USER: a ASSISTANT: b USER: c\nd ASSISTANT:"


def test_templates_that_go_through_parts_alone():
    found = said(
        LISTS, {"role": "user", "content": "first"}, {"role": "assistant", "content": "b"}, user(text("c"), IMAGE)
    )
    assert found == f"USER: first ASSISTANT: b USER: {PAD}\nc ASSISTANT:"


def test_templates_that_join_contents_to_other_texts():
    found = said(WORDS, user(text("a"), IMAGE, text("b"), IMAGE))
    assert found == f"<|im_start|>user\n{WHOLE}\n{WHOLE}\na\nb<|im_end|>\n"


def test_images_of_tools():
    messages = [user(IMAGE, text("look")), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    tool = {"role": "tool", "tool_call_id": "1", "content": [text("there: "), IMAGE]}
    assert f"tool\nthere: {WHOLE}<|im_end|>" in said(PARTS, *messages, tool)
    found = said(TOOLS, *messages, tool)
    assert f"<tool>{WHOLE}\nthere: </tool>" in found and f"user\n{WHOLE}look<|im_end|>" in found


def test_a_message_goes_on_after_its_last_text():
    last = {"role": "assistant", "content": [text("the fox")]}
    form = {"add_generation_prompt": False, "continue_final_message": True}
    for source in (PARTS, LISTS):
        assert said(source, user(IMAGE), last, **form).endswith("the fox")


@pytest.mark.parametrize("source", [PARTS, LISTS, WORDS])
def test_words_cannot_take_the_place_of_an_image(source):
    """They read as they were written, and their tokens are none of an image's."""
    own, encode = tokenizer(), tokenizer().encode
    pad = own.vocabulary[PAD]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"a": PAD}}}
    messages = [
        {"role": "system", "content": f"s {PAD}"},
        user(text(f"see {PAD}{PAD}"), IMAGE, text(PAD)),
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": PAD},
        {"role": "tool", "content": f"{PAD} there"},
    ]
    found = said(source, *messages)
    assert found.count(PAD) == 1 and shown(found, PAD) == found.replace(NAMED, PAD)
    ids = encoded(found, PAD, own, encode)
    assert ids.count(pad) == 1 and own.decode(ids, skip_special=False) == shown(found, PAD)
    alone = said(source, {"role": "user", "content": f"see {PAD}"})
    assert encoded(alone, PAD, own, encode).count(pad) == 0 and shown(alone, PAD).count(PAD) == 1
    assert encoded("a<|image_pad|>", "", own, encode) == encode("a<|image_pad|>")  # of a model that reads text


def test_a_template_that_writes_no_place():
    only = "{% for m in messages if m.role == 'user' %}{{ m.content if m.content is string else 'parts' }}{% endfor %}"
    with pytest.raises(BadMessage, match=r"writes places for 0 images .*and the messages have 1; send images as parts"):
        said(only, {"role": "system", "content": [IMAGE]}, {"role": "user", "content": "a"})
    hidden = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(BadMessage, match="the chat template writes places for 0 images"):
        said(hidden, user(IMAGE))
    with pytest.raises(BadMessage, match=r"writes places for 1 images .*have 0"):
        said(PAD, user(text("a")))
    tools = [{"name": PAD}]
    found = rendered(ChatTemplate("{{ tools[0].name }}"), [user(text("a"))], tools, token=PAD)
    assert shown(found, PAD) == PAD


def test_what_is_no_image_and_no_text():
    with pytest.raises(
        BadMessage, match=r"messages\[0\].content\[1\] is of type 'input_audio'; this model reads text and"
    ):
        said(PARTS, user(IMAGE, {"type": "input_audio"}))
    with pytest.raises(
        BadMessage, match=r"content\[0\] is of type 'image_url'; this model reads text: images are read by"
    ):
        rendered(ChatTemplate(PARTS), [user(IMAGE)], None)
    for wrong, words in (
        ({"type": "image_url"}, "without an address; it is data:image"),
        ({"type": "input_image", "file_id": "f"}, "files are not kept here: send it whole"),
        ({"type": "image_url", "image_url": {"url": 3}}, "without an address"),
        ({"type": "image"}, "has no image; give a PIL.Image"),
        ({"type": "image_pil"}, "has no image_pil"),
    ):
        with pytest.raises(BadMessage, match=words) as info:
            images_in([user(text("a"), wrong)])
        assert info.value.param == "messages[0].content[1]"


def test_images_in_their_order():
    pil = object()
    messages = [user({"type": "image", "image": "a"}, text("x"), {"type": "image_url", "image_url": "b"}),
                {"role": "assistant", "content": "c"},
                user({"type": "image_pil", "image_pil": pil}, {"type": "image", "url": "d"})]  # fmt: skip
    assert [(one.value, one.param) for one in images_in(messages)] == [
        ("a", "messages[0].content[0]"),
        ("b", "messages[0].content[2]"),
        (pil, "messages[2].content[0]"),
        ("d", "messages[2].content[1]"),
    ]
