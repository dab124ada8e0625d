"""A budget of thoughts: the reply is the one without it for so many tokens of thought, then the mark that ends them."""

import pytest
from engines import TOKENIZER, decoding_from, finished, folder_of, random_engine

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.serve.llm import LLM
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.serve.thoughts import Thoughts

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)
MARK = 'true, "'  # of several tokens, as in a tokenizer that has none for it
END = TOKENIZER.encode(MARK)
INSIDE = Thoughts(MARK, MARK, ("name",), "")
OPENED = Thoughts(MARK, MARK, ("né", "a", "na"))
CHOICES = ("ags", "12,")


def replies(engine, **params) -> list:
    sampled = {"temperature": 1.2, "logit_bias": {TOKENIZER.encode("na")[0]: 2.0}, "max_tokens": 30, "ignore_eos": True}
    for seed in range(8):
        engine.add(str(seed), [5, 6, 7], SamplingParams(**(sampled | {"seed": seed, "n": 2} | params)))
    found = finished(engine)
    return [one for seed in range(8) for one in found[str(seed)].outputs]


def begun(tokens: list[int]) -> int | None:
    """How many tokens the beginning of thoughts takes; None: the reply does not think."""
    for count in range(len(tokens) + 1):
        words = TOKENIZER.decode(tokens[:count]).lstrip()
        if words.startswith(OPENED.begins):
            return count
        if not any(begin.startswith(words.rstrip("�")) for begin in OPENED.begins):
            return None
    return None


def engine_of(drafts=None):
    return random_engine(MeshSpec(), rows=10, tokens=32, pages=300, least=10, speculative=drafts)[0]


@pytest.fixture(scope="module")
def engine():
    return engine_of()


@pytest.mark.parametrize("drafts", (None, pytest.param(NGRAM, marks=pytest.mark.wide)))
def test_thoughts_end_after_so_many_tokens(drafts, engine):
    engine = engine_of(drafts) if drafts else engine
    free = [one.token_ids for one in replies(engine)]
    for budget in (0, 1, 7, 8):
        for held in (None, StructuredOutputs(choice=CHOICES)):
            more = {"structured_outputs": held, "thoughts": INSIDE, "thinking_token_budget": budget}
            for plain, one in zip(free, replies(engine, **more), strict=True):
                end = budget + len(END)
                assert one.token_ids[:end] == [*plain[:budget], *END], "the mark comes by chance too seldom to matter"
                assert len(one.token_ids) == 30 or (held and TOKENIZER.decode(one.token_ids[end:]) in CHOICES)
    assert [one.token_ids for one in replies(engine, thinking_token_budget=30, thoughts=INSIDE)] == free


def test_only_what_is_thought_counts(engine):
    """A prompt may have begun with it, and a reply may think or not."""
    said = Thoughts(MARK, MARK, ("name",), "x y, x")
    left = 9 - len(TOKENIZER.encode(said.said))
    assert 0 < left < 9
    for one in replies(engine, thinking_token_budget=9, thoughts=said):
        assert one.token_ids[left : left + len(END)] == END
    bias = {TOKENIZER.encode(text)[0]: 4.5 for text in ("n", "a", " ")}
    free = [one.token_ids for one in replies(engine, logit_bias=bias)]
    thinking = 0
    for plain, one in zip(
        free, replies(engine, logit_bias=bias, thinking_token_budget=3, thoughts=OPENED), strict=True
    ):
        first = begun(plain)
        wanted = plain if first is None else [*plain[: first + 3], *END]
        assert one.token_ids[: len(wanted)] == wanted
        thinking += first is not None
    assert 4 <= thinking <= 12


def test_a_mark_that_comes_in_time_ends_them(engine):
    """The budget is over with it, and the reply goes on as without."""
    mark = Thoughts("na", "na", (), "")
    free, early = [one.token_ids for one in replies(engine, max_tokens=40)], 0
    for plain, one in zip(free, replies(engine, max_tokens=40, thoughts=mark, thinking_token_budget=20), strict=True):
        if "na" in TOKENIZER.decode(plain[:20]):
            early += 1
            assert one.token_ids == plain
        else:
            assert one.token_ids[:22] == [*plain[:20], *TOKENIZER.encode("na")]
    assert 0 < early < len(free)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}"
TEMPLATE += "{% if plain %}<think></think>{% else %}<think>\n{% endif %}{% endif %}"


def test_from_python(tmp_path):
    folder = folder_of(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "block_size": 4, "kv_cache_bytes": 2**20}
    with decoding_from(3):
        llm = LLM(folder, **options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, thinking_token_budget=5)
    end, chat = TOKENIZER.encode("</think>"), [{"role": "user", "content": "x <think>"}]
    space = len(TOKENIZER.encode("\n"))
    [thinking], [plain] = llm.chat(chat, params), llm.chat(chat, params, chat_template_kwargs={"plain": True})
    ids = thinking.outputs[0].token_ids
    assert ids[5 - space :][: len(end)] == end and "</think>" in thinking.outputs[0].text
    assert "</think>" not in plain.outputs[0].text and len(plain.outputs[0].token_ids) == 24
    held = SamplingParams(max_tokens=40, thinking_token_budget=2, structured_outputs=StructuredOutputs(choice=CHOICES))
    assert llm.chat(chat, held)[0].outputs[0].text.split("</think>")[1] in CHOICES
    texts = ["<think>x", "x</think>y", TOKENIZER.encode("a<think>")]
    ends = [one.outputs[0].token_ids for one in llm.generate(texts, params)]
    used = [len(TOKENIZER.encode("x")), None, 0]
    for ids, count in zip(ends, used, strict=True):
        assert (ids[5 - count :][: len(end)] == end) if count is not None else "</think>" not in TOKENIZER.decode(ids)
    llm._reasoning = None
    with pytest.raises(ShardlmError, match=r"thinking_token_budget=5 needs .* no reasoning parser is chosen"):
        llm.generate("a", params)
    with pytest.raises(ShardlmError, match=r"reasoning_parser='r1' must be one of"):
        LLM(folder, **options, reasoning_parser="r1")


def test_what_is_refused(engine):
    with pytest.raises(ShardlmError, match="thinking_token_budget=3, and it is not known how this model marks"):
        engine.add("a", [1], SamplingParams(thinking_token_budget=3))
    assert not engine.has_unfinished
    for budget in (-2, 1.0, True, "4"):
        with pytest.raises(ShardlmError, match=r"thinking_token_budget=.* must be .*at least 0, or -1 for any number"):
            SamplingParams(thinking_token_budget=budget)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    with pytest.raises(ShardlmError, match="thoughts='x' must be a Thoughts"):
        SamplingParams(thoughts="x")
