"""What the requests of a serving plan are like: as the benchmark makes or reads them, and found in the prefix cache by
the scheduler itself. The fluid is held to that scheduler."""

import collections
import dataclasses
import json
import random

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from commands import run
from test_serving_load import replica_of
from test_sweep import config

from launch import plan_serve_flags
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.answer import answer_serving
from shardlm.plan.serving.arrivals import Programs, times_of_requests
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.load import Load, Replica
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.mix import Mix, of_file
from shardlm.plan.serving.report.data import to_json
from shardlm.plan.serving.report.html import to_html
from shardlm.plan.serving.report.text import to_text
from shardlm.plan.serving.time import Speed
from shardlm.plan.target import ServingTarget
from shardlm.serve.bench.workload import lengths, prompts
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.pool_size import scheduler_of
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams
from shardlm.tokenizer import train_bpe

ALONE = Load(1e-3, 0.0, 0.0, 0.0, 0.0, "")


def ids(count: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(1000) for _ in range(count)]


def written(path, entries) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def listed(path, entries, output_len: int = 32) -> ServingCase:
    """A case of a file's requests."""
    mix = of_file(written(path, entries), output_len, None, 1000, 16)
    return dataclasses.replace(replica_of(1024, 16).case, listed=mix, file=str(path))


def replica(case: ServingCase) -> Replica:
    return Replica.of(case, Speed.of(case, serving_memory(case)))


def test_lengths_are_spread_as_the_benchmark_spreads_them():
    case = replica_of(1000, 100, range_ratio=0.5).case
    drawn = lengths(20_000, 1000, 100, 0.5, 3)
    assert [(kind.prompt, kind.output) for kind in case.mix.draw(50, 3)] == lengths(50, 1000, 100, 0.5, 3)
    asked, told = np.array(drawn, float).T
    assert (asked.min(), asked.max(), told.min(), told.max()) == (500, 1500, 50, 150)
    assert case.mix.longest == 1650
    kinds = np.array([(kind.prompt, kind.output) for kind in case.mix.kinds], float).T
    assert (case.mix.prompt, case.mix.output) == pytest.approx((1000, 100), rel=0.01)
    assert kinds.std(axis=1) == pytest.approx([asked.std(), told.std()], rel=0.02)
    assert case.mix.context == pytest.approx(np.sum(told * (asked + told / 2)) / told.sum(), rel=0.01)
    assert case.mix.draw(9, 3) != case.mix.draw(9, 4)


def test_what_is_shared_is_found_and_not_computed():
    one = replica_of(2000, 16, shared_prefix=1000)
    times = times_of_requests(Programs(one), ALONE)
    assert times["cached_share"] == pytest.approx(992 / 2000 * 999 / 1000)  # whole pages, but of the first request
    assert times["ttft_seconds"]["p50"] == pytest.approx(one.alone, rel=0.01)
    assert one.alone == one.speed.prefill(2000, 992) < 0.7 * replica_of(2000, 16).alone
    whole = replica_of(2000, 16, shared_prefix=2000)
    assert whole.case.mix.found == 1984  # the last token is run, for what follows it
    off = replica_of(2000, 16, EngineConfig(enable_prefix_caching=False), shared_prefix=1000)
    assert off.alone == replica_of(2000, 16).alone and not off.case.mix.shares
    assert times_of_requests(Programs(off), ALONE)["cached_share"] == 0


@pytest.mark.parametrize(
    ("asked", "share"),
    [
        ({"range_ratio": 0.6}, 0.5),
        ({"range_ratio": 0.6}, 0.8),  # by prompts that fill programs the first token was told 35% too early
        ({"shared_prefix": 768}, 0.5),
        ({"range_ratio": 0.4, "shared_prefix": 512}, 0.5),
    ],
)
def test_means_are_those_of_the_scheduler(asked, share):
    one = replica_of(1024, 64, **asked)
    load = one.at(share * one.most().rate)
    found = times_of_requests(Programs(one), load)
    assert load.ttft_seconds == pytest.approx(found["ttft_seconds"]["mean"], rel=0.2)
    assert load.itl_seconds == pytest.approx(found["tpot_seconds"]["mean"], rel=0.2)
    assert found["cached_share"] == pytest.approx(one.case.mix.found / one.case.mix.prompt, rel=0.03)


def test_a_wait_grows_with_the_square_of_the_service():
    """Pollaczek-Khinchine: prompts of 64 and 2,048 tokens, whose replies are their first token."""
    one = replica_of(1056, 1)
    short, long = (dataclasses.replace(one.case.mix.kinds[0], prompt=length) for length in (64, 2048))
    case = dataclasses.replace(one.case, listed=Mix((short, long), None, 16))
    mixed = replica(case)
    assert mixed.uneven == pytest.approx(np.mean([mixed.speed.prefill(n) ** 2 for n in (64, 2048)]) / mixed.alone**2)
    rate = 0.3 / mixed.alone
    runs = [times_of_requests(Programs(mixed), Load(rate, 1.0, 0, 0, 0, ""), seed)["ttft_seconds"] for seed in range(4)]
    wait = np.mean([run["mean"] for run in runs]) - mixed.alone
    assert wait == pytest.approx(rate * mixed.uneven * mixed.alone**2 / (2 * 0.7), rel=0.15)


@pytest.mark.parametrize("asked", [{}, {"shared_prefix": 12}, {"range_ratio": 0.4, "shared_prefix": 8}])
def test_the_real_scheduler_runs_as_many_at_once(asked):
    sizes = {"max_model_len": 48, "block_size": 4, "max_num_seqs": 64, "max_num_batched_tokens": 72, "decode_steps": 4}
    engine = EngineConfig(**sizes, kv_cache_bytes=400 * 131_072)
    case = replica_of(20, 9, engine, **asked).case
    memory = serving_memory(case)
    most = memory.at_once_of(case.mix)
    assert memory.at_once(20, 9) <= most < 64 and bool(asked) == (most > memory.at_once(20, 9))
    scheduler = scheduler_of(memory.sizes, engine)
    shared = prompts(1, 20, 0, 99)[0][: case.shared_prefix]
    coming, ran = collections.deque(enumerate(lengths(300, 20, 9, case.range_ratio, 0))), []
    while coming or scheduler.has_unfinished:
        while coming and scheduler.num_waiting < 4:  # of all at once the shortest would run together
            number, (prompt, output) = coming.popleft()
            own = [1000 + number * 40 + i for i in range(prompt - len(shared))]
            scheduler.add(Request(str(number), shared + own, SamplingParams(max_tokens=output, ignore_eos=True)))
        batch = scheduler.schedule()
        ran.append(scheduler.num_running)
        scheduler.land(batch, np.full((len(batch.rows), batch.steps), 7))
    most_ran = max(ran)
    # As many at their longest; those who are not yet hold less.
    assert most <= most_ran <= 1.4 * most + 1, (most, most_ran)


def test_a_file_is_read_with_what_its_requests_share(tmp_path):
    system = ids(100, 0)
    entries = [{"prompt": system + ids(60 + i, i), "max_tokens": 5 + i} for i in range(1, 4)]
    case = listed(tmp_path / "a.jsonl", [*entries, {"prompt": ids(40, 9)}])
    told = {(kind.prompt, kind.output): len(kind.shared) for kind in case.mix.kinds}
    assert told == {(161, 6): 6, (162, 7): 6, (163, 8): 6, (40, 32): 0}
    assert case.mix.longest == 171 and case.mix.found == 3 * 96 / 4
    # More requests than the file has: what one has for itself is new each time.
    times = times_of_requests(Programs(replica(case)), ALONE)
    assert times["cached_share"] == pytest.approx(case.mix.found / case.mix.prompt, rel=0.02)
    twice = listed(tmp_path / "b.jsonl", [entries[0], entries[0]])
    assert twice.mix.found == 160
    drawn = case.mix.draw(8, seed=1)
    assert drawn[:4] == drawn[4:] and sorted(drawn[:4], key=case.mix.kinds.index) == list(case.mix.kinds)


def test_texts_and_chats_are_read_as_the_server_reads_them(tmp_path):
    tokenizer = train_bpe(["a mesh is a page is a mesh"], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    talk = [{"from": "human", "value": "a page"}, {"from": "gpt", "value": "yes"}]
    path = written(tmp_path / "f.jsonl", [{"prompt": "a mesh"}, {"conversations": talk, "max_tokens": 3}])
    found = of_file(path, 8, tmp_path, 300, 16).kinds
    expected = {(len(tokenizer.encode_prompt("a mesh")), 8), (len(tokenizer.encode("user: a page\n")), 3)}
    assert {(kind.prompt, kind.output) for kind in found} == expected
    with pytest.raises(ShardlmError, match=r"f\.jsonl has texts, and a configuration has no tokenizer"):
        of_file(path, 8, None, 300, 16)
    for entry, said in (
        ({"prompt": [999]}, "token 999 of the prompt"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens=0"),
    ):
        with pytest.raises(ShardlmError, match=said):
            of_file(written(tmp_path / "g.jsonl", [entry]), 8, None, 300, 16)


def test_an_answer_says_what_was_assumed(tmp_path):
    case = replica_of(1000, 32, range_ratio=0.5, shared_prefix=400).case
    told = json.loads(json.dumps(to_json(answer_serving(case))))
    assert told["asked"]["range_ratio"] == 0.5 and told["asked"]["shared_prefix"] == 400
    assert told["requests"]["prompt_tokens"] == {"mean": pytest.approx(1000, rel=0.01), "least": 500, "most": 1500}
    assert told["requests"]["shared_tokens"] == 400 and 0.35 < told["times_of_requests"]["cached_share"] < 0.45
    spread = "prompts of 500 to 1,500 (on average 1,000) tokens, the first 400 the same in all, replies of 16 to 48"
    cached = "were in the prefix cache; all other estimates are with 40%"
    for said in (to_text(told), to_html(told)):
        said = " ".join(said.split())
        assert spread in said and cached in said
    case = dataclasses.replace(case, engine=EngineConfig(enable_prefix_caching=False))
    text = " ".join(to_text(to_json(answer_serving(case))).split())
    assert "the same in all, and no prefix cache, replies" in text and "were in the prefix cache" not in text
    case = listed(tmp_path / "a.jsonl", [{"prompt": ids(40, i)} for i in range(3)])
    text = " ".join(to_text(to_json(answer_serving(case))).split())
    assert "3 requests of" in text and "a.jsonl: prompts of 40 tokens, replies of 32" in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"range_ratio": 1.0}, "range_ratio=1 is a share of the lengths, from 0"),
        ({"shared_prefix": 1001}, "shared_prefix=1001 is above prompt_len=1000; a prompt begins"),
        (
            {"shared_prefix": 600, "range_ratio": 0.5},
            "shared_prefix=600 is above prompt_len=1000, of which range_ratio=0.5 makes the shortest 500",
        ),
        (
            {"engine": EngineConfig(max_model_len=1500), "range_ratio": 0.5},
            "prompt_len=1000 and output_len=100 with range_ratio=0.5 are up to 1650 tokens, and max_model_len=1500",
        ),
    ],
)
def test_what_cannot_be_is_refused(asked, said):
    with pytest.raises(ShardlmError, match=said):
        replica_of(1000, 100, **asked)


def test_the_command_takes_a_file(tmp_path):
    path = written(tmp_path / "f.jsonl", [{"prompt": ids(300 + i, i), "max_tokens": 4} for i in range(3)])
    words = ("--serve", "--config=configs/llama3_8b.py", "--gpu=h100", "--num_gpus=1", "--verify=0", f"--file={path}")
    done = run("launch.plan", *words, "--format=json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["asked"]["prompt_len"] == 301 and told["requests"]["output_tokens"]["most"] == 4
    assert told["asked"]["file"] == path and told["requests"]["listed"] == 3
    for more, target, message in (
        (["--prompt_len=7"], None, f"--prompt_len=7 says what requests are like, and so does --file={path}"),
        ([], ServingTarget(5, 20, 2), r"the target says .* like, and so does --file=.* target of 5 requests/s alone"),
        (["--request_rate=5"], ServingTarget(5), "--request_rate is what the target says"),
        (["--prompt_len=7"], ServingTarget(5), "--prompt_len=7 says what requests are like"),
        (
            ["--file="],
            ServingTarget(5),
            r"does not say how long requests are: write '500 requests/s at .* or give --file",
        ),
        (["--max_model_len=304"], None, "2 of 3 requests of .* max_model_len=304, the longest 306 tokens"),
    ):
        with flagsaver.flagsaver(), pytest.raises(ShardlmError, match=message):
            flags.FLAGS(["x", f"--file={path}", *more])
            plan_serve_flags.serving_case(config("llama3_8b"), Cluster.of(GPUS["h100"], 1), target)
