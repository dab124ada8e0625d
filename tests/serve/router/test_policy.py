"""Which replica is chosen: the rule by hand, and what holds whatever comes."""

import json
import time
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from shardlm.serve.api.settings import HttpSettings
from shardlm.serve.router.policy import Policy, PrefixMemory
from shardlm.serve.router.prompt import BLOCK, IMAGE, MOST_BLOCKS, hints


def blocks(*names):
    return [name.encode() for name in names]


def test_the_replica_with_the_beginning_unless_it_is_too_busy():
    policy = Policy(threshold=2, least_match=0.5)
    talk = blocks("a", "ab", "abc", "abcd")
    assert [policy.choose({"x": 0, "y": 0}, talk).replica for _ in range(3)] == ["x", "y", "x"]  # in turn
    policy.sent(talk, "y")
    assert policy.choose({"x": 0, "y": 2}, talk) == policy.choose({"x": 5, "y": 7}, talk)
    chosen = policy.choose({"x": 0, "y": 2}, [*talk, *blocks("abcde")])
    assert (chosen.replica, chosen.match) == ("y", 4)
    assert policy.choose({"x": 0, "y": 3}, talk).replica == "x"
    # Less than half of it is there: the least loaded, and of equals who has it.
    other = blocks("a", "ab", "abz", "abzz", "abzzz")
    assert policy.choose({"x": 0, "y": 1}, other).replica == "x"
    assert [policy.choose({"x": 1, "y": 1}, other).replica for _ in range(3)] == ["y"] * 3
    # Two have it: the longer match, then the less loaded.
    policy.sent(talk[:3], "x")
    assert policy.choose({"x": 0, "y": 2}, talk).replica == "y"
    policy.sent(talk, "x")
    assert policy.choose({"x": 0, "y": 2}, talk).replica == "x"
    policy.forget("x")
    assert policy.choose({"x": 0, "y": 2}, talk).replica == "y"
    assert policy.choose({"x": 0}, talk) == policy.choose({"x": 9}, talk)
    assert policy.choose({"x": 0, "y": 0}, []).match == 0


def test_memory_keeps_what_was_used_last():
    memory = PrefixMemory(3)
    memory.add(blocks("a", "ab", "abc"), "x")
    memory.add(blocks("q"), "y")
    assert len(memory) == 3 and memory.matches(blocks("a", "ab", "abc")) == {"x": 2}
    memory.add(blocks("1", "2", "3", "4"), "y")  # of a prompt above it the beginning
    assert len(memory) == 3 and memory.matches(blocks("1", "2", "3", "4")) == {"y": 3}
    memory.add(blocks("1"), "x")
    assert memory.matches(blocks("1", "2")) == {"x": 1, "y": 2}
    memory.forget("y")
    assert len(memory) == 1 and memory.matches(blocks("2")) == {}


NAMES = st.sampled_from("wxyz")
PROMPTS = st.lists(st.sampled_from("ab"), max_size=6).map(
    lambda p: blocks(*("".join(p[: i + 1]) for i in range(len(p))))
)
LOADS = st.dictionaries(NAMES, st.integers(0, 9), min_size=1)


@settings(deadline=None)
@given(
    st.lists(st.tuples(LOADS, PROMPTS, st.booleans()), max_size=40),
    st.integers(0, 4),
    st.floats(0, 1),
    st.integers(1, 8),
)
def test_whatever_comes(steps, threshold, least_match, capacity):
    """Only who may be taken; never busier than the threshold allows; the match is what was sent; memory is bounded."""
    policy = Policy(threshold, least_match, capacity)
    sent = {name: set() for name in "wxyz"}
    for loads, prompt, restarts in steps:
        choice = policy.choose(loads, prompt)
        assert choice.replica in loads
        assert loads[choice.replica] <= min(loads.values()) + threshold
        assert set(prompt[: choice.match]) <= sent[choice.replica]
        if choice.match < least_match * len(prompt):
            assert loads[choice.replica] == min(loads.values())
        policy.sent(prompt, choice.replica)
        sent[choice.replica] |= set(prompt)
        assert len(policy.memory) <= capacity
        if prompt and len(prompt) <= capacity:
            again = policy.choose(dict.fromkeys(loads, 0), prompt)
            assert again.match == len(prompt)
        if restarts:
            policy.forget(choice.replica)
            sent[choice.replica] = set()


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=100), st.integers(1, 5))
def test_load_is_bounded_when_all_ask_the_same(held, threshold):
    """Requests with one beginning that stay: the loads never differ by more than the threshold and one."""
    policy = Policy(threshold)
    loads = dict.fromkeys("wxyz"[: 1 + max(held)], 0)
    for _ in held * 2:
        choice = policy.choose(loads, blocks("a", "ab"))
        policy.sent(blocks("a", "ab"), choice.replica)
        loads[choice.replica] += 1
        assert max(loads.values()) - min(loads.values()) <= threshold + 1


def of(**body):
    return hints(json.dumps(body).encode())


def test_beginnings_of_requests():
    system = {"role": "system", "content": "s" * BLOCK * 2}
    first = [system, {"role": "user", "content": "q" * 300}]
    more = [*first, {"role": "assistant", "content": "r" * 300}, {"content": "t" * 300, "role": "user"}]
    one, two = of(model="m", messages=first).blocks, of(messages=more, model="m").blocks
    assert len(one) == 3 and len(two) == 5 and two[:3] == one
    assert of(model="other", messages=first).blocks[0] != one[0] and of(model="m", messages=first).model == "m"
    assert of(model="m", messages=first, tools=[{"a": 1}]).blocks[0] != one[0]
    parts = [{"role": "system", "content": [{"type": "text", "text": "s" * 600}]}]
    assert len(of(messages=parts).blocks) == 2
    # Texts, several, token ids; instructions come before the input.
    text = "word " * 200
    assert of(prompt=text).blocks == of(prompt=[text, "other"]).blocks == of(input=text).blocks
    assert of(prompt=list(range(500))).blocks[:3] == of(prompt=[[*range(500), 7]]).blocks[:3] != ()
    assert of(instructions=text, input="x").blocks == of(instructions=text, input=[first[1]]).blocks[:3]
    assert len(of(prompt="a" * 10**6).blocks) == MOST_BLOCKS
    # Ollama's conversations in tokens.
    so_far = of(context=[*range(500)], prompt=text).blocks
    assert of(context=[*range(600)], prompt="b").blocks[:7] == so_far[:7] != of(prompt=text).blocks[:7]


def test_beginnings_of_anthropics_requests():
    """What Claude Code changes with each request is no part of them: its first block, and where caches have marks."""
    said = [{"type": "text", "text": "t" * 600}]
    marked = [{**said[0], "cache_control": {"type": "ephemeral"}}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": "r" * 600}

    def asks(number, *contents):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}, *marked]
        return of(model="m", system=system, messages=[{"role": "user", "content": one} for one in contents]).blocks

    first = asks(1, said, [{**result, "cache_control": {"type": "ephemeral"}}])
    assert len(first) == 7 and asks(2, marked, [result], said)[:7] == first == asks(3, "t" * 600, [result])
    assert of(model="m", system="t" * 600, messages=[]).blocks == first[:2]
    assert of(model="m", system="u" * 600, messages=[]).blocks[0] != first[0]


def test_beginnings_with_images():
    """Each counts as about as many blocks as its tokens fill, whatever its file has, and what follows decides too."""
    large, other = "A" * 10_000_000 + "b", "A" * 10_000_000 + "c"
    words, text = "w" * BLOCK * 2, {"type": "text", "text": "t" * BLOCK * 2}

    def openai(data):
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    def anthropic(data):
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def chat(*contents):
        return of(messages=[{"role": "user", "content": one} for one in contents]).blocks

    for part in (openai, anthropic, lambda data: {"type": "input_image", "image_url": f"data:,{data}"}):
        first = chat(words, [part(large), text])
        assert len(first) == 2 + IMAGE // BLOCK + 2
        assert chat(words, [part(large), text], "more")[: len(first)] == first
        assert chat(words, [part(other), text])[:3] == first[:2] + chat(words, [part(other)])[2:3] != first[:3]
        assert chat(words, [part(large), {"type": "text", "text": "u" * 600}])[:18] == first[:18] != first
    tool = [{"type": "tool_result", "tool_use_id": "1", "content": [text, anthropic(large)]}]
    assert 18 <= len(chat(tool)) <= 19
    marked = [{**anthropic(large), "cache_control": {"type": "ephemeral"}}]
    assert chat(marked) == chat([anthropic(large)]) != chat([anthropic(other)])
    ollama = [{"role": "user", "content": words, "images": [large]}]
    assert len(of(messages=ollama).blocks) == 18 == len(of(prompt=words, images=[large]).blocks)
    assert of(messages=ollama).blocks != of(messages=[{**ollama[0], "images": [other]}]).blocks
    assert of(prompt=words, images=[large]).blocks != of(prompt=words, images=[other]).blocks
    for wrong in (5, "x", {"a": 1}, [None, 5]):
        assert of(prompt="a", images=wrong, model=3).model is None


def test_a_body_of_images_is_looked_at_in_little_time():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000_000}}
    body = json.dumps({"messages": [{"role": "user", "content": [part, part, part]}]}).encode()
    assert len(body) < HttpSettings().max_body
    begun = time.process_time()
    assert len(hints(body).blocks) == 3 * IMAGE // BLOCK
    assert time.process_time() - begun < 1  # 0.05 s; a character at a time it were ten


def test_bodies_that_make_no_sense_have_no_beginning():
    for body in (b"", b"{", b"[]", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 10**5):
        assert hints(body) == hints(b"{}")
    for wrong in (5, [None], [["x"], 5], {"a": 1}, [[[[]]]]):
        for field in ("prompt", "messages", "input", "instructions", "tools", "system", "context"):
            assert of(**{field: wrong, "model": wrong}).model is None


def test_small_bodies_stay_small():
    """Where each of many images counts as thousands of characters, and results of tools are in results of tools."""
    within = {"type": "text", "text": '"'}
    for _ in range(20):  # each level alone would write twice as much: 40 of them, in 1.5 KB, more than any memory
        within = {"type": "tool_result", "content": [within]}
    several = [
        [{"type": "image"}] * 50_000,
        [{"type": "tool_result", "content": [{"type": "image"}] * 50_000}],
        [within],
    ]
    bodies = [{"messages": [{"role": "user", "content": content}]} for content in several]
    bodies += [{"images": [0] * 50_000}, {"messages": [{"role": "user", "images": [0] * 50_000}]}]
    for body in bodies:
        given = json.dumps(body).encode()
        tracemalloc.start()
        assert len(hints(given).blocks) > 32
        assert tracemalloc.get_traced_memory()[1] < len(given) * 40 + 2**21
        tracemalloc.stop()
