"""The page at / as a person uses it, in headless Chromium: SHARDLM_CHROMIUM names the browser."""

import base64
import contextlib
import io

import chromium
import numpy as np
import pytest
from client import Client
from fake_llm import FakeLLM
from PIL import Image
from seeing_llm import SeeingLLM, picture
from sockets import listens

from shardlm.serve.adapter_table import Adapter, LoRARequest

BROWSER = chromium.find()
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here: SHARDLM_CHROMIUM=PATH names one")
REPLY = "the quick brown fox jumps over the lazy dog, é日🙂 " * 2
LAST = "[...document.querySelectorAll('#talk > .assistant')].at(-1)"


@contextlib.contextmanager
def serving(llm, **settings):
    with listens(Client(llm, **settings).app) as (_, address):
        yield f"{address}/"


def test_thoughts_are_shown_apart_and_not_said_again(tmp_path):
    llm = FakeLLM(reply="<think>I look.</think>the fox", template_name="qwen3")
    with serving(llm) as address, chromium.browser(BROWSER, tmp_path) as page:
        page.open(address)
        for count in (1, 2):
            page.type("text", "hello")
            page.press_enter()
            page.until(f"document.querySelectorAll('.user').length == {count} && {LAST}.textContent == 'the fox'")
            page.until("document.getElementById('send').textContent == 'Send'")
        assert page.value("document.querySelector('.thought').textContent") == "I look." and page.errors == []
    assert "the fox" in llm.seen[-1][0] and "I look." not in llm.seen[-1][0]


def test_a_model_without_a_chat_template_goes_on_with_the_text(tmp_path):
    llm = FakeLLM(reply=" the fox", template_name="")
    with serving(llm) as address, chromium.browser(BROWSER, tmp_path) as page:
        page.open(address)
        for count, words in enumerate(("the lazy dog,", " and then"), 1):
            page.type("text", words)
            page.press_enter()
            page.until(f"document.querySelectorAll('.user').length == {count} && {LAST}.textContent == ' the fox'")
            page.until("document.getElementById('send').textContent == 'Send'")
        assert page.errors == []
    assert [text for text, _, _ in llm.seen] == ["the lazy dog,", "the lazy dog, the fox and then"]


def test_an_adapter_is_chosen_as_a_model(tmp_path):
    llm = FakeLLM(adapters=(Adapter("poet", "folder", 1, 1),))
    with serving(llm) as address, chromium.browser(BROWSER, tmp_path) as page:
        page.open(address)
        page.until(
            "document.querySelectorAll('#which > option').length == 2 && !document.getElementById('choice').hidden"
        )
        for name in ("fake", "poet"):
            page.value(f"document.getElementById('which').value = '{name}'")
            page.type("text", "hello")
            page.press_enter()
            page.until(f"{LAST}?.textContent && document.getElementById('send').textContent == 'Send'")
            page.until(f"document.getElementById('which').value == '{name}'")  # it stays
        assert page.errors == []
    assert llm.adapted == [None, LoRARequest("poet")]


def test_a_person_chats_and_watches(tmp_path):
    llm = FakeLLM(reply=REPLY, delay=0.15)
    with serving(llm, api_keys=("secret",)) as address, chromium.browser(BROWSER, tmp_path) as page:
        page.open(address)
        page.until("document.getElementById('load')?.textContent.includes('KV 0.0 %')")
        assert page.value("document.getElementById('model').textContent") == "fake"
        page.type("key", "secret")
        page.type("text", "hello <b>there</b>")
        page.press_enter()
        assert page.until("document.querySelector('#talk > .user').textContent") == "hello <b>there</b>"
        seen = {page.until(f"{LAST}?.textContent")}
        page.until("/\\D1 running.*KV 12.5 %/.test(document.getElementById('load').textContent)")
        page.until("parseInt(document.getElementById('load').textContent) > 0")  # tokens a second
        while page.value("document.getElementById('send').textContent") == "Stop":
            seen.add(page.value(f"{LAST}.textContent"))
        assert page.value(f"{LAST}.textContent") == REPLY
        assert len(seen) > 5 and all(REPLY.startswith(text.rstrip("\ufffd")) for text in seen)  # it came in pieces
        heights = (
            "new Set(document.getElementById('curve').getAttribute('points').split(' ').map(p => p.split(',')[1]))"
        )
        assert page.value(f"{heights}.size") > 1
        page.press_enter()  # nothing is written: nothing is sent
        page.type("text", "again")
        page.press_enter()
        page.until(f"document.querySelectorAll('#talk > .user').length == 2 && {LAST}.textContent")
        page.value("document.getElementById('send').click()")  # Stop
        page.until("document.getElementById('send').textContent == 'Send'")
        partial = page.value(f"{LAST}.textContent")
        assert REPLY.startswith(partial) and len(partial) < len(REPLY)
        assert len(page.errors) == 1 and "401" in page.errors[0]  # its models, before there was a key
        history, params, _ = llm.seen[-1]
        assert len(llm.seen) == 2 and REPLY.strip() in history and "again" in history and params.temperature == 0.7
        page.value("document.getElementById('clear').click(); document.getElementById('key').value = 'wrong'")
        page.type("text", "hello")
        page.press_enter()
        assert "asks for a key" in page.until("document.querySelector('#talk > .error')?.textContent")
    assert len(llm.aborted) == 1 and not llm.running


EVENTS = {
    "paste": "document.getElementById('text').dispatchEvent(new ClipboardEvent('paste', {clipboardData: d}))",
    "drop": "document.dispatchEvent(new DragEvent('drop', {dataTransfer: d}))",
}


def dropped(kind, data):
    """JavaScript: a file is pasted into the text, or dropped anywhere."""
    file = f"Uint8Array.from(atob('{base64.b64encode(data).decode()}'), c => c.charCodeAt(0))"
    file = f"new File([{file}], 'a.png', {{type: 'image/png'}})"
    return f"const d = new DataTransfer(); d.items.add({file}); {EVENTS[kind]}"


def run(page, script):
    page.value(f"(() => {{ {script} }})()")


def test_images_are_sent_where_the_model_sees(tmp_path):
    llm = SeeingLLM()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 2500, 3), np.uint8))
    large = io.BytesIO()
    noise.save(large, "PNG")
    assert large.tell() > 2**20
    with serving(llm) as address, chromium.browser(BROWSER, tmp_path) as page:
        page.open(address)
        page.until("!document.getElementById('attach').hidden")
        for count, (kind, file) in enumerate(
            [("paste", picture()), ("drop", picture(16, 16)), ("drop", large.getvalue())], 1
        ):
            run(page, dropped(kind, file))
            page.until(f"document.querySelectorAll('#images > img').length == {count}")
        run(page, dropped("drop", picture(64, 64)))
        page.until("document.querySelectorAll('#images > img').length == 4")
        run(page, "document.querySelector('#images > img:last-child').click()")
        page.type("text", "what are they?")
        page.press_enter()
        page.until(f"document.querySelectorAll('.user > img').length == 3 && {LAST}.textContent == {llm.reply!r}")
        assert page.value("document.querySelectorAll('#images > img').length") == 0
        assert [one.picture.grid for one in llm.pictures[-1]] == [(2, 3), (1, 1), (491 // 16, 2048 // 16)]
        assert "what are they?" in llm.seen[-1][0]
        page.until("document.getElementById('send').textContent == 'Send'")
        run(page, dropped("paste", picture(32, 16)))
        page.until("document.querySelectorAll('#images > img').length == 1")
        page.press_enter()
        page.until("document.querySelectorAll('.user').length == 2")
        page.until("document.getElementById('send').textContent == 'Send'")
        assert [one.picture.grid for one in llm.pictures[-1]][3:] == [(2, 1)] and page.errors == []
        run(page, dropped("drop", b"no image" * 2**18))
        page.until("document.querySelector('#talk > .error')?.textContent.startsWith('a.png: ')")


def test_a_model_that_reads_text_has_no_button_for_images(tmp_path):
    with serving(FakeLLM()) as address, chromium.browser(BROWSER, tmp_path) as page:
        page.open(address)
        page.until("document.querySelectorAll('#which > option').length == 1")
        run(page, dropped("drop", picture()))
        assert page.value("document.getElementById('attach').hidden && !document.querySelector('img')")
        assert page.errors == []
