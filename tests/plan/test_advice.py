"""Hardware for a training target: the fewest GPUs by a naive search, prices, reasons, and what cannot be reached."""

import dataclasses
import json

import pytest
from commands import run
from test_sweep import small

from shardlm.clusters import CLUSTERS
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.hardware_file import SHIPPED
from shardlm.ops.schemes import SCHEMES
from shardlm.plan.advice import SYSTEMS, advise, kind_named
from shardlm.plan.advice_output import reasons, to_json, to_text
from shardlm.plan.asked import cluster_of
from shardlm.plan.columns import dollars, large, percent, rounded
from shardlm.plan.constraints import FREE, Constraints
from shardlm.plan.ladder import Ladder
from shardlm.plan.search import search
from shardlm.plan.target import DAY, ServingTarget, TrainingTarget, parse_target

H100, ZERO3 = CLUSTERS["dgx-h100"], Constraints.parse(["rules=zero3,hybrid", "mesh.pipeline=1"])


def ladder(rate: float, one=None, most_rows: int = 4096) -> Ladder:
    return Ladder(one or small(), H100, GPUS["h100"], ZERO3, rate, most_rows)


def rate_on(num_gpus: int, rows: int = 64) -> float:
    plans = search(small() if rows == 64 else resized(rows), cluster_of("h100", None, num_gpus), ZERO3).plans
    return plans[0].cost.tokens_per_second


def resized(rows: int):
    one = small()
    return dataclasses.replace(one, train=dataclasses.replace(one.train, global_batch=rows))


@pytest.fixture(scope="module")
def rates():
    """Tokens/s by the number of GPUs, at the configuration's batch, whose 64 rows all of these divide over."""
    return {n: rate_on(n) for n in (8, 16, 32)}


def test_the_fewest_is_the_first_of_all_doublings_that_reaches_the_rate(rates):
    for count in rates:
        exactly = ladder(rates[count]).fewest()
        assert (exactly.num_gpus, exactly.global_batch) == (count, 64)
        assert exactly.rate == rates[count]
    above = ladder(rates[32] * 1.0001).fewest()
    assert above.num_gpus > 32 and above.rate >= rates[32] * 1.0001


def test_no_number_is_left_out_that_products_of_what_will_be_served_may_reach():
    least = {one: ladder(1e7, dataclasses.replace(small(), matmul=one)).least for one in ("dtype", "fp8", *SCHEMES)}
    assert least["W4A16"] == least["W8A16"] == least["dtype"]
    assert least["FP8_DYNAMIC"] == least["fp8"] < least["dtype"]


def test_between_doublings_there_are_sixteenths_of_whole_hosts(rates):
    wanted = rates[32] * 1.1
    asked = ladder(wanted)
    found = asked.fewest()
    assert 32 < found.num_gpus < 64 and found.num_gpus % 8 == 0
    assert found.rate == rate_on(found.num_gpus, found.global_batch) >= wanted
    assert found.global_batch == 2 * found.num_gpus  # 64 rows do not divide over 40, 48 or 56 GPUs
    assert 32 in {one.num_gpus for one in asked.tried}
    assert all(one.rate < wanted for one in asked.tried if one.num_gpus < found.num_gpus)


def test_more_days_never_need_more_gpus_or_a_faster_machine():
    counts = [ladder(1e13 / days / DAY).fewest().num_gpus for days in (1, 2, 4, 8, 16, 64)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def test_no_number_below_the_peak_is_tried(rates):
    asked = ladder(rates[32])
    asked.fewest()
    assert 8 < asked.least < 32 and min(one.num_gpus for one in asked.tried) >= asked.least


@pytest.fixture(scope="module")
def advice():
    names = ("aws-p5", "azure-nd-h100-v5", "dgx-h100", "h200", "gb300-nvl72")
    heard = []
    found = advise(small(), TrainingTarget(1e13, 4), ZERO3, names=names, say=heard.append)
    assert heard[::4] == ["looking at aws-p5 (h100) ...", "looking at gb300-nvl72 (gb300) ..."]
    return found


def test_offers_come_by_dollars_and_say_what_they_cost(advice):
    assert advice.best is advice.offers[0] and not advice.nothing
    assert [o.kind.name for o in advice.offers][-1] == "gb300-nvl72" and not advice.offers[
        -1
    ].budget.dollars_per_gpu_hour
    priced = [o.dollars for o in advice.offers[:-1]]
    assert priced == sorted(priced) and all(o.reached and o.days <= 4 for o in advice.offers)
    by_name = {o.kind.name: o for o in advice.offers}
    aws, azure, dgx = (by_name[name] for name in ("aws-p5", "azure-nd-h100-v5", "dgx-h100"))
    assert dgx.point == azure.point and dgx.dollars < azure.dollars  # equal hosts are one search, at two prices
    assert aws.point != azure.point  # another fabric
    assert aws.days == pytest.approx(1e13 / aws.point.rate / DAY)
    assert aws.dollars == pytest.approx(aws.days * 24 * aws.point.num_gpus * 6.88)
    assert aws.megawatt_hours == pytest.approx(aws.days * 24 * aws.point.num_gpus * 700 / 1e6)
    assert by_name["h200"].point.plan.gpu.name == "h200"


def test_reasons_give_the_numbers(advice):
    best = advice.best
    said = " ".join(reasons(advice, best))
    assert f"takes the peak rate of {best.least_gpus:.1f}" in said or f"{best.least_gpus:.2f}" in said
    assert f"{best.point.num_gpus} in {best.point.num_gpus // 8} hosts do it in" in said and "% " in said
    assert f"Twice as many, {2 * best.point.num_gpus}, with the same batch would take" in said
    assert f"${best.budget.dollars_per_gpu_hour:.2f}" in said
    assert "No price of a gb300 is known" in " ".join(reasons(advice, advice.offers[-1]))
    raised = advise(small(), TrainingTarget(0.9 * rate_on(128, 128) * DAY, 1), ZERO3, names=["h100"]).offers[0]
    said = " ".join(reasons(advice, raised))
    assert raised.in_time and raised.point.global_batch == raised.point.num_gpus > 64
    assert "configuration's global batch of 64 rows" in said and "set the learning rate for it" in said
    told = to_json(advice)
    assert told["offers"][0]["reasons"] == reasons(advice, best) and json.dumps(told)
    text = to_text(advice)
    assert text.startswith("10 T tokens in 4 days: 28,935,185 tokens/s") and "1. " in text
    assert max(map(len, text.splitlines())) <= 120


def test_what_is_too_slow_too_dear_or_does_not_fit_says_what_stops_it():
    fixed = advise(small(), TrainingTarget(1e15, 1), ZERO3, names=["h100"], max_batch_tokens=1)
    offer = fixed.offers[0]
    assert fixed.best is None and not offer.in_time and offer.point.global_batch == 64
    said = " ".join(reasons(fixed, offer))
    assert "are the fastest of those tried" in said and "most of a step is" in said
    assert "too slow" in to_text(fixed)
    dear = advise(small(), TrainingTarget(1e13, 30), ZERO3, names=["h100"], max_dollars=10)
    assert dear.best is None and dear.offers[0].in_time and "too dear" in to_text(dear)
    said = " ".join(reasons(dear, dear.offers[0]))
    enough = dear.offers[0].budget.dollars_per_gpu_hour * 10 / dear.offers[0].dollars
    assert f"more than the $10 allowed, which ${rounded(enough, 2)} would meet" in said
    held = Constraints.parse(["mesh.tensor=7"])
    none = advise(small(), TrainingTarget(1e12, 3000), held, names=["h100"])
    assert not none.offers and none.nothing[0][0].name == "h100" and "nothing fits or runs" in to_text(none)


def test_a_target_is_read_strictly():
    assert parse_target("2T tokens in 30 days") == TrainingTarget(2e12, 30)
    assert parse_target(" 1.5 b  tokens in 12 hours ") == TrainingTarget(1.5e9, 0.5)
    assert parse_target("500 requests/s at 2k in, 200 out") == ServingTarget(500, 2000, 200)
    assert parse_target("1 request/s at 1.5k in, 8 out") == ServingTarget(1, 1500, 8)
    assert parse_target("0.5 requests/s") == ServingTarget(0.5)  # of a file
    assert TrainingTarget(DAY * 20, 10).tokens_per_second == 2
    wrong = ("2T in 30 days", "2 tokens", "2Q tokens in 3 days", "500 requests", "", "-2T tokens in 3 days")
    for text in (
        *wrong,
        "2T tokens in 3 parsecs",
        "1,5T tokens in 3 days",
        "5 requests/month",
        "1e400 tokens in 1 day",
    ):
        with pytest.raises(
            ShardlmError, match=r"'2T tokens in 30 days'.*weeks.*'500 requests/s at 2k in, 200 out'.*2e12"
        ):
            parse_target(text)
    with pytest.raises(ShardlmError, match="more than 0"):
        parse_target("0T tokens in 30 days")
    with pytest.raises(ShardlmError, match="more than 0"):
        parse_target("5 requests/s at 0 in, 2 out")
    with pytest.raises(ShardlmError, match="whole number"):
        parse_target("5 requests/s at 1.5 in, 2 out")


def test_a_target_is_read_in_other_units_and_numbers():
    for text in ("2e12 tokens in 6 weeks", "2,000,000,000,000 tokens in 42 days", "2 trillion tokens in 1,008 hours"):
        assert parse_target(text) == TrainingTarget(2e12, 42)
    assert parse_target("500k tokens in 90 minutes") == TrainingTarget(5e5, 0.0625)
    assert parse_target("2.5T tokens in 12 months") == parse_target("2.5e+12 tokens in 1 year")
    assert parse_target("1K tokens in 1 month") == TrainingTarget(1e3, 365 / 12)
    for text in ("120 requests/min at 2k in, 200 out", "120 requests per minute at 2,000 tokens in, 200 tokens out"):
        assert parse_target(text) == ServingTarget(2, 2000, 200)
    assert parse_target("2 requests per second") == parse_target("7.2k requests / hour") == ServingTarget(2)


def test_a_target_may_say_what_is_done_with_a_model_of_what_size():
    plain = parse_target("2T tokens in 30 days")
    assert parse_target("Train 2T tokens within 30 days") == plain
    for words in ("train 70B on", "pretrain a 70B model on", "pre-train 70 billion parameters for", "train 70B-param"):
        found = parse_target(f"{words} 2T tokens in 30 days")
        assert dataclasses.replace(found, size=None) == plain and found.size.parameters == 70e9, words
    asked = ServingTarget(500, 2000, 200)
    assert parse_target("serve 500 requests/s at 2k in, 200 out") == asked
    found = parse_target("serve a 70B model at 500 req/s @ 2k in and 200 out")
    assert dataclasses.replace(found, size=None) == asked and found.size.text == "70B"
    for text in ("train 500 requests/s", "serve 2T tokens in 3 days", "train on 2T tokens in 3 days"):
        with pytest.raises(ShardlmError, match="'train 70B on' or 'serve a 70B model at' may stand before it"):
            parse_target(text)
    with pytest.raises(ShardlmError, match="more than 0"):
        parse_target("train 0B on 2T tokens in 3 days")


def test_a_size_that_a_target_names_is_the_models():
    def named(text: str, total: float, active: float = 0) -> None:
        parse_target(f"train {text} on 2T tokens in 30 days").size.check(int(total), int(active or total))

    named("70B", 70.55e9)
    named("7B", 6.74e9)
    named("1B", 1.24e9)  # rounds to it
    named("7B", 7.616e9)  # is cut to it, Qwen 2.5's
    named("14B", 14.77e9)
    named("7e10", 70.55e9)
    for size in ("47B", "13B"):
        named(size, 46.7e9, 12.88e9)
    with pytest.raises(ShardlmError, match=r"says 8B, and .* has 46\.7B parameters, 12\.9B of them for each .* 8B"):
        named("8B", 46.7e9, 12.88e9)
    for size in ("8B", "6B"):
        with pytest.raises(ShardlmError, match="has 7B parameters"):
            named(size, 7.0e9)
    with pytest.raises(ShardlmError, match=r"says 0\.6B, and the configuration's model has 494M parameters; name the"):
        named("0.6B", 494e6)


def test_what_is_small_or_large_is_not_rounded_away():
    assert [rounded(x) for x in (0, 3.858e-5, 0.4, 0.6, 1234.5)] == ["0", "3.9e-05", "0.4", "1", "1,234"]
    costs = {0: "0.00", 7.7e-6: "7.7e-06", 0.004: "0.004", 0.5: "0.50", 9.99: "9.99", 12.3: "12", 1234: "1,234"}
    assert [dollars(x) for x in costs] == list(costs.values())
    assert [percent(x) for x in (0, 0.00123, 0.5)] == ["0%", "0.12%", "50%"] and percent(1e-5, 1) == "0.001%"
    assert [large(x) for x in (5e5, 300, 0.04167, 2e12, 1e18)] == ["500,000", "300", "0.04167", "2 T", "1,000,000 T"]
    slow = advise(small(), TrainingTarget(1e3, 300), ZERO3, names=["h100"])
    first, _, _, row, *_ = to_text(slow).splitlines()
    assert first.startswith("1,000 tokens in 300 days: 3.86e-05 tokens/s") and float(row.split()[4]) > 0


def test_a_kind_is_a_cluster_or_a_gpu():
    assert kind_named("aws-p5", SHIPPED) is CLUSTERS["aws-p5"]
    assert (kind_named("L40S", SHIPPED).gpu, kind_named("L40S", SHIPPED).gpus_per_host) == ("l40s", 8)
    with pytest.raises(ShardlmError, match="did you mean aws-p5"):
        advise(small(), TrainingTarget(1e12, 3), FREE, names=["aws-p55"])


def test_the_command_advises(tmp_path):
    words = ("--config=configs/llama3_8b.py", "--target=train 8B on 1T tokens in 30 days", "--clusters=h100")
    words += ("--rules=zero3",)
    done = run("launch.whatif", *words, "--mesh.pipeline=1", "--format=json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["offers"][0]["days"] <= 30
    done = run("launch.whatif", "--config=configs/llama3_8b.py", "--target=soon")
    assert done.returncode == 1 and "'2T tokens in 30 days'" in done.stderr and "Traceback" not in done.stderr
    done = run("launch.whatif", "--config=configs/llama3_8b.py", "--target=train 70B on 1T tokens in 3 days")
    assert done.returncode == 1 and "says 70B" in done.stderr and "model has 8.03B" in done.stderr
    done = run("launch.whatif", "--config=configs/llama3_8b.py", "--target=1T tokens in 3 days", "--gpu=h100")
    assert done.returncode == 1 and "--gpu does not go with a target" in done.stderr


def test_all_of_nvidias_own_systems_are_looked_at_where_none_is_named():
    assert set(SYSTEMS) == {name for name in CLUSTERS if name.startswith("dgx-") or name.endswith("-nvl72")}
