"""What if: sweeps of one thing, their output, and the search that looks for the fastest alone. By formulas alone."""

import dataclasses
import json
import math
import pathlib
import random

import pytest
from commands import run

from shardlm.config import load
from shardlm.errors import ShardlmError
from shardlm.hardware_file import SHIPPED
from shardlm.models.llama import LlamaConfig
from shardlm.plan.alike import Alike
from shardlm.plan.asked import cluster_of, list_price
from shardlm.plan.bound import Bound
from shardlm.plan.changed import changed
from shardlm.plan.constraints import FREE, Constraints
from shardlm.plan.cost import Layers
from shardlm.plan.least import Least
from shardlm.plan.plan import Plan
from shardlm.plan.search import _all, _search, search
from shardlm.plan.shares import described, limited_by, shares
from shardlm.plan.sweep import Over, base_cluster, sweep
from shardlm.plan.sweep_output import to_json, to_text
from shardlm.plan.sweep_picture import plot
from shardlm.plan.ways import REMATS, by_schedule, keeps, laid_out
from shardlm.prices import PRICES
from shardlm.train.config import OffloadConfig

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"


def config(name: str, **train):
    loaded = load(str(CONFIGS / f"{name}.py"))
    return dataclasses.replace(loaded, train=dataclasses.replace(loaded.train, **train))


def small(**train):
    """A model of 0.4 B parameters: a GPU holds it, so that searches are short."""
    model = LlamaConfig(embed_dim=1024, num_layers=8, num_heads=8, mlp_dim=4096, vocab_size=32_768)
    one = config("llama3_8b", **({"global_batch": 64, "seq_len": 2048} | train))
    return dataclasses.replace(one, model=model)


HELD = Constraints.parse(["mesh.tensor<=2"])


def swept(text: str, one, **options):
    over = Over.parse(text)
    given = {name: options.pop(name, None) for name in ("gpu", "cluster", "num_gpus")}
    return sweep(one, base_cluster(over, *given.values()), over, **options)


@pytest.mark.parametrize(
    ("name", "train", "gpu", "num_gpus", "words"),
    [
        ("llama3_8b", {"global_batch": 64}, "a100-40gb", 16, ()),
        ("llama3_70b", {}, "h100", 128, ()),  # too few rows: pipelines and long contexts compete
        ("mixtral_8x7b", {}, "h100", 32, ("rules=zero3",)),
        ("llama3_8b", {"global_batch": 16}, "h100", 16, ("mesh.pipeline=2,4", "matmul=dtype,fp8")),
    ],
)
def test_the_fastest_alone_is_the_first_of_the_whole_search(name, train, gpu, num_gpus, words):
    wanted, cluster, held = config(name, **train), cluster_of(gpu, None, num_gpus), Constraints.parse(words)
    whole = _search(wanted, held, [OffloadConfig()], Alike(cluster), beam=10**6)
    fast = search(wanted, cluster, held, every=False)
    assert fast.plans[0].step_seconds == whole.plans[0].step_seconds
    assert fast.plans[0].config == whole.plans[0].config
    assert fast.considered < 0.7 * whole.considered


@pytest.mark.parametrize(("name", "fabric"), [("llama3_70b", "infiniband"), ("mixtral_8x7b", "tcp")])
def test_no_way_to_run_on_a_mesh_takes_less_than_the_search_hopes(name, fabric):
    one, cluster = config(name, global_batch=64), cluster_of("h100", None, 64, fabric=fabric)
    meshes = [laid for laid in laid_out(one, cluster, FREE) if laid.mesh.pipeline in (1, 4)]
    least = Least(Alike(cluster), Bound(one.model.transformer()), meshes, FREE, [OffloadConfig()])
    for laid in random.Random(0).sample(meshes, 8):
        floor, seconds = least.floor(laid), least.hope(laid).seconds
        plans = [
            plan for plan in _all(laid, Alike(cluster), FREE, [OffloadConfig()]) if isinstance(plan, Plan) and plan.fits
        ]
        fastest = min((plan.step_seconds for plan in plans), default=math.inf)
        assert floor <= seconds <= fastest and (not plans or fastest <= 2 * seconds)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_of_a_mesh_bounds_all_with_its_inner_axes(seed):
    """Whatever the preset and the sizes of data and fsdp: by a bound that is too high the best plan is lost. Meshes are
    looked at in turn, so that each is bounded by what is kept of those before it; all of them are taken to fit."""
    dice = random.Random(seed)
    name = ("llama3_8b", "deepseek_v3", "mixtral_8x7b", "diloco_two_sites")[seed % 4]
    gpu, fabric = dice.choice(("h100", "h200", "a100-pcie", "rtx4090")), dice.choice(("infiniband", "tcp"))
    gpus, words = dice.choice((16, 32)), dice.choice(((), ("matmul=dtype,int8",)))
    one, cluster = config(name, global_batch=2 * gpus, seq_len=2048), cluster_of(gpu, None, gpus, fabric=fabric)
    constraints, bound = Constraints.parse(words), Bound(one.model.transformer())
    alike: dict[tuple, list] = {}
    meshes = list(laid_out(one, cluster, constraints))
    for laid in meshes:
        alike.setdefault(dataclasses.replace(laid.mesh, data=1, fsdp=1), []).append(laid)
    least = Least(Alike(cluster), bound, meshes, constraints, [OffloadConfig()])
    least.may_fit = lambda variants, kept: True
    layers, compared = {}, 0
    for inner in dice.sample([inner for inner in alike if len(alike[inner]) > 2], 4):
        way, remat = dice.random(), dice.random()
        for laid in dice.sample(alike[inner], min(6, len(alike[inner]))):
            floor, hope = least.floor(laid), least.hope(laid)
            assert floor <= hope.seconds
            schedules = by_schedule(laid, constraints)
            variants = schedules[int(way * len(schedules))]
            keep = list(keeps(variants[0], REMATS, [OffloadConfig()]))
            kept = keep[int(remat * len(keep))]
            try:
                plan = Plan.of(changed(variants[-1], **kept), cluster)
            except ShardlmError:
                continue
            least.further(hope, variants, kept)
            bound.seconds = plan.step_seconds
            assert hope.seconds <= plan.step_seconds and hope.knows(plan.config) and not hope.excludes(plan.config)
            bound.seconds = math.inf
            found = Layers.of(plan.sketch, cluster)
            key = (inner, plan.config.pipeline, plan.config.matmul, remat, Layers.by_rest(plan.sketch))
            assert layers.setdefault(key, found) == found
            compared += 1
    assert compared > 4 and len(layers) < compared


@pytest.fixture(scope="module")
def strong():
    return swept("num_gpus=8,16,64", small(), gpu="h100", tokens=1e12)


def test_a_row_is_the_best_plan_of_its_value(strong):
    assert [row.case.cluster.num_gpus for row in strong.rows] == [8, 16, 64] and strong.fits
    for row in strong.rows:
        assert row.case.config.train.global_batch == 64
        assert sum(shares(row.plan).values()) == pytest.approx(1)
        largest = max(shares(row.plan), key=shares(row.plan).get)
        assert limited_by(row.plan).startswith(largest)
    first = strong.rows[0]
    assert first.plan.config == search(first.case.config, first.case.cluster).plans[0].config
    rates = [rate for _, rate, _ in strong.throughput()]
    assert rates == sorted(rates) and [n for n, *_ in strong.throughput()] == [8, 16, 64]
    each = [rate / n for n, rate, _ in strong.throughput()]
    assert each == sorted(each, reverse=True)  # the batch stays: more GPUs are used less well


def test_the_plain_data_is_that_of_the_plan_and_its_run(strong):
    told, row = to_json(strong)["rows"][1], strong.rows[1]
    assert told["settings"]["mesh.fsdp"] == row.plan.config.mesh.fsdp and told["status"] == "estimated"
    assert told["tokens_per_second"] == 64 * 2048 / told["step_seconds"]
    assert told["tokens_per_second_per_gpu"] * 16 == told["tokens_per_second"]
    assert told["days"] == pytest.approx(1e12 / told["tokens_per_second"] / 86_400)
    assert told["dollars"] == pytest.approx(told["days"] * 24 * 16 * told["dollars_per_gpu_hour"])
    assert told["dollars_per_gpu_hour"] == list_price("h100")[0] and "median" in told["price_source"]
    lines = to_text(strong).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["8", "16", "64"]
    assert f"{row.plan.mfu:.1%}" in lines[2] and described(row.plan) in lines[2] and limited_by(row.plan) in lines[2]
    assert "Global batch 64 rows of 2,048 tokens; days and dollars are of 1 T tokens" in " ".join(lines)
    assert "fewer rows than GPUs" not in to_text(strong)
    alone = dataclasses.replace(row.case, config=small(global_batch=8))
    few = dataclasses.replace(strong, rows=(dataclasses.replace(row, case=alone),))
    assert "fewer rows than GPUs, from 16 on" in " ".join(to_text(few).split())


def test_rows_per_gpu_stay_where_the_batch_is_scaled():
    weak = swept("num_gpus=32,8,16", small(), gpu="h100", tokens=1e12, scale_batch=True)
    assert [row.case.config.train.global_batch for row in weak.rows] == [256, 64, 128]
    assert {row.case.budget.tokens for row in weak.rows} == {1e12}
    table = to_text(weak).splitlines()
    assert table[0].split()[:2] == ["num_gpus", "batch"] and table[1].split()[:2] == ["32", "256"]
    with pytest.raises(ShardlmError, match=r"64 rows on 24 GPUs is 85.3333 on 32.*multiples of 24 GPUs"):
        swept("num_gpus=24,32", small(), gpu="h100", scale_batch=True)


def test_gpus_clusters_fields_and_searched_fields_are_swept():
    gpus = swept("gpu=a100,h100", small(), num_gpus=8)
    assert [row.case.cluster.gpu.name for row in gpus.rows] == ["a100", "h100"]
    assert gpus.rows[1].plan.step_seconds < gpus.rows[0].plan.step_seconds
    clusters = swept("cluster=aws-p5,gcp-a3-high", small(), num_gpus=32)
    slow = SHIPPED.cluster("gcp-a3-high").nic_bytes_per_second
    assert clusters.rows[1].case.cluster.nic_bytes_per_second == slow
    assert [row.case.cluster.fabric for row in clusters.rows] == ["efa", "tcp"]
    with pytest.raises(ShardlmError, match="each cluster of the sweep has its own; leave it out"):
        base_cluster(clusters.over, None, None, 32, 0, None, fabric="roce")
    assert clusters.rows[0].case.budget.price_source == "list price of aws"
    assert "median of list prices" in clusters.rows[1].case.budget.price_source
    lengths = swept("train.seq_len=1024,4096", small(), gpu="h100", num_gpus=8)
    assert [row.plan.config.train.seq_len for row in lengths.rows] == [1024, 4096]
    assert len({row.case.budget.tokens for row in lengths.rows}) == 1  # of the configuration as given
    tensor = swept("mesh.tensor=1,8", small(), gpu="h100", num_gpus=8, constraints=Constraints.parse(["remat=full"]))
    assert [row.plan.config.mesh.tensor for row in tensor.rows] == [1, 8]
    assert {row.plan.config.remat for row in tensor.rows} == {"full"}


def test_a_value_that_nothing_fits_or_runs_with_says_why_and_what_would():
    found = swept("num_gpus=4,64", config("llama3_70b"), gpu="h100")
    assert [row.plan is None for row in found.rows] == [True, False] and found.fits
    why, change = found.rows[0].why, found.rows[0].change
    assert "nothing fits: the smallest plan needs" in why and change.plan.fits
    assert found.throughput()[0] == (4, 0.0, False) and to_json(found)["rows"][0]["change"] == change.what
    text = " ".join(to_text(found).split())
    assert f"num_gpus=4: {why}; it fits with {change.what} (estimated)" in text
    none = swept("mesh.tensor=8,7", small(), gpu="h100", num_gpus=8)
    assert none.rows[0].plan and none.rows[1].plan is None and "with mesh.tensor=7" in none.rows[1].why


def test_it_is_drawn(strong, tmp_path):
    plot(strong, tmp_path / "one.png")
    plot(swept("gpu=h100,h200", small(), num_gpus=8), tmp_path / "two.png")
    one, two = (tmp_path / "one.png").read_bytes(), (tmp_path / "two.png").read_bytes()
    assert one.startswith(b"\x89PNG") and two.startswith(b"\x89PNG") and one != two


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("num_gpus", {"gpu": "h100"}, "FIELD=VALUE,VALUE"),
        ("num_gpus=8,,16", {"gpu": "h100"}, "FIELD=VALUE,VALUE"),
        ("num_gpus=8,8", {"gpu": "h100"}, "8 is there twice"),
        ("num_gpus=8,x", {"gpu": "h100"}, "num_gpus=x: a number of GPUs is a whole number"),
        ("num_gpus=8,12", {"gpu": "h100"}, "does not fill hosts of 8; choose 8 or 16"),
        ("num_gpus=8", {"gpu": "h100", "num_gpus": 8}, "--num_gpus=8 is what the sweep varies"),
        ("num_gpus=8", {"gpu": "local"}, "a sweep measures nothing; give the machine's profile"),
        ("num_gpus=8", {}, "--gpu=NAME or --cluster=NAME"),
        ("gpu=h100", {"cluster": "aws-p5", "num_gpus": 8}, "--cluster=aws-p5 says the gpu too"),
        ("gpu=h100,h1000", {"num_gpus": 8}, "did you mean h100?"),
        ("cluster=aws-p55", {"num_gpus": 8}, "did you mean aws-p5"),
        ("train.seq_le=1", {"gpu": "h100", "num_gpus": 8}, "did you mean seq_len"),
        ("num_gpu=8", {"gpu": "h100", "num_gpus": 8}, "or one of num_gpus, gpu, cluster"),
        ("train.seq_len=long", {"gpu": "h100", "num_gpus": 8}, "sweep of train.seq_len"),
        ("mesh.tensor=1,2", {"gpu": "h100", "num_gpus": 8, "constraints": HELD}, "mesh.tensor is what the sweep"),
        ("gpu=h100", {"num_gpus": 8, "scale_batch": True}, "scale_batch goes with a sweep of num_gpus"),
    ],
)
def test_what_is_no_sweep_is_refused_before_anything_is_searched(text, options, message):
    with pytest.raises(ShardlmError) as error:
        swept(text, small(), **options)
    assert message in str(error.value)


def test_prices_of_a_cluster_are_its_providers():
    azure = [price.dollars_per_hour for price in PRICES if (price.gpu, price.provider) == ("h100", "azure")]
    assert list_price("h100", "azure-nd-h100-v5") == (*azure, "list price of azure")
    assert list_price("gb300", "gb300-nvl72") == (0.0, "")


def test_the_command_sweeps_and_says_what_is_wrong(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(
        "import dataclasses, sys\n"
        f"sys.path.insert(0, {str(CONFIGS)!r})\n"
        "import llama3_8b\n"
        "from shardlm.models.llama import LlamaConfig\n"
        "def get_config():\n"
        "    model = LlamaConfig(embed_dim=1024, num_layers=8, num_heads=8, mlp_dim=4096, vocab_size=32_768)\n"
        "    return dataclasses.replace(llama3_8b.get_config(), model=model)\n"
    )
    words = (f"--config={path}", "--gpu=h100", "--sweep=num_gpus=8,16", "--rules=zero3")
    done = run("launch.whatif", *words, "--format=json", f"--png={tmp_path / 'sweep.png'}", "--tokens=1e12")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["settings"]["rules"] for row in told["rows"]] == ["zero3", "zero3"]
    assert told["rows"][0]["tokens"] == 1e12 and (tmp_path / "sweep.png").exists()
    done = run("launch.whatif", f"--config={path}", "--sweep=num_gpus=8", "--max_dollars=3")
    assert done.returncode == 1 and "--max_dollars does not go with a sweep" in done.stderr, done.stderr
