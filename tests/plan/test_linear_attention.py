"""Plans of models some of whose layers are linear attention: their FLOPs, bytes and memory by hand, what a search lays
out for them, and what serving them takes. Compiled programs are the other files' (random_runs.py, record_memory.py)."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from random_runs import MODELS, PICKED

from shardlm import flops
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.hlo.flops import matmul_flops
from shardlm.hlo.rows import layer_of
from shardlm.hlo.text import Frame
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.lora import LoraConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.models.qwen_hybrid import QwenHybridConfig
from shardlm.ops.gated_delta import CHUNK, gated_delta
from shardlm.plan import delta_kernels
from shardlm.plan.cluster import Cluster
from shardlm.plan.compute import operations
from shardlm.plan.constraints import Constraints
from shardlm.plan.linear_attention import Rule, convolved, divides, held, key_heads, products, projections
from shardlm.plan.memory import memory
from shardlm.plan.search import search
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.linear_attention import operations as prompt
from shardlm.plan.serving.linear_attention import state_bytes
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.ops import Pass, layer_work
from shardlm.plan.serving.time import Speed
from shardlm.plan.sketch import Sketch
from shardlm.plan.ways import laid_out
from shardlm.rules import Rules
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.train.check import check_model
from shardlm.train.config import RunConfig, TrainConfig

H100 = GPUS["h100"]
SMALL = QwenHybridConfig(1024, 256, 8, 4, 8, 4, 64, 512, 12, 6, 64, 128)  # heads by which 4 ways do not go


def run(model: QwenHybridConfig | Pretrained = SMALL, **how) -> RunConfig:
    train = TrainConfig(global_batch=8, seq_len=4096)
    return RunConfig(model, **{"precision": "bf16", "mesh": MeshSpec(), "train": train} | how)


def test_model_flops_by_hand():
    """Of each of 24 layers and tokens 32 heads' states of [128, 128], three times forward."""
    shape = QwenHybridConfig().transformer()
    once = flops.memory_width(32, 128, 128)
    assert once == 3 * 32 * 128 * 128
    assert shape.attention_macs(0, 1000) == 24 * 1000 * once
    assert shape.attention_macs(500, 0) == 500 * shape.attention_width() == 500 * 8 * 16 * 2 * 256
    assert MambaConfig(128, 8, 128, 64, 4).macs_per_token() == 2 * 128 * 128 * 64  # which reads by the query alone


@pytest.mark.parametrize("kind", ["by head", "by channel", "takes nothing back"])
def test_products_of_the_rule_are_those_of_its_programs(kind):
    """On a CPU, the forward pass and its gradients each by itself, of heads of keys that are fewer and of another size
    than those of values, in two chunks."""
    by_channel, summed = kind == "by channel", kind == "takes nothing back"
    B, T, K, N, H, V = 2, 200 if summed else 100, 2, 4, 32, 64
    attention = MambaConfig(N, K, H, V) if summed else DeltaNetConfig(N, K, H, V, by_channel=by_channel)
    rule = functools.partial(gated_delta, takes_back=not summed)
    decays = (B, T, N, H) if by_channel else (B, T, N)
    shapes = [(B, T, K, H), (B, T, K, H), (B, T, N, V), decays, (B, T, N), (B, N, H, V)]
    arrays, text = [jnp.ones(shape) for shape in shapes], jnp.zeros((B, T), jnp.int32)

    def flops_of(run, *given):
        return matmul_flops(jax.jit(run).lower(*given).compile().as_text()).flops

    out, gradients = jax.jit(lambda *arrays: jax.vjp(lambda *arrays: rule(*arrays, text), *arrays))(*arrays)
    ops = list(products(Rule.of_rows(attention, T, B, 1, 4)))
    assert flops_of(rule, *arrays, text) == sum(op.flops * op.count for op in ops)
    backward = flops_of(lambda gradients, out: gradients(out), gradients, out)
    assert backward == sum(op.flops * op.count * op.gradients for op in ops)


def test_projections_of_linear_and_gated_attention_are_all_there():
    """Each weight of a layer multiplies each token once, forward."""
    sketch = Sketch.of(run(), H100)
    mine = [op for op in operations(sketch) if op.layer in ("attention", "linear attention", "mlp") and not op.both]
    forward = sum(op.flops * op.forward for op in mine if op.unit == "matmul")
    head = SMALL.vocab_size * SMALL.embed_dim
    assert forward == 2 * sketch.tokens * (sketch.shape.parameters_per_token() - head)


@pytest.mark.parametrize("remat,again", [("none", 0), ("dots", 1), ("names", 1), ("full", 1)])
def test_what_is_made_again(remat, again):
    """Products of the rule are batches, which "dots" keeps none of. In float32, by XLA, what states need is made again,
    the inverse without a gradient; the rest is its gradients'. In 16 bits all kernels run again, and the others make
    gradients: of one head of keys for two of values, 3.5 times what outputs take."""
    found = {name: operations(Sketch.of(run(remat=remat, precision=name), H100)) for name in ("fp32", "bf16")}

    def sums(what: str, precision: str = "fp32") -> tuple[float, ...]:
        mine = [op for op in found[precision] if op.what == what]
        return tuple(sum(getattr(op, name) for op in mine) for name in ("forward", "again", "count"))

    layers, products = 6, 6 + 2 + 2
    assert sums("inverse") == (layers * products, layers * products * again, layers * products * (1 + again))
    assert sums("states") == (layers, layers * again, layers * (2 + again))
    assert sums("reads") == (2 * layers, 0, 2 * layers * 3.5)
    H, V, C = 64, 128, CHUNK
    carried, others = (3 * H * V + C * V) / (2 * H * V), C * (H + V) + 2 * C * V + 3 * H * V + (2 + 4) * C * H / 2
    gradients = {"changes of an empty state": 0, "states": carried, "outputs": others / (H * V + C * (H + V))}
    for what, own in gradients.items():
        assert sums(what, "bf16") == pytest.approx((layers, layers * again, layers * (1 + again + own)))
    assert not sums("inverse", "bf16")[0]


def test_what_kernels_keep_by_hand():
    """Of each chunk and head (I + L)^-1, changes and the state; all of what layers keep without recomputation is less
    than XLA's products keep."""
    rule = Rule.of_rows(DeltaNetConfig(32, 16, 128, 128), 8192, 1, 1, 2)
    own, narrow = 128 * 32 * 2 * (64 * 64 + 64 * 128 + 128 * 128), 2 * 8192 * (32 + 2 * 16) * 128
    assert held(rule, narrow) - own == delta_kernels.HELD * narrow
    by_xla = dataclasses.replace(rule, on_cpu=True)
    assert held(rule, narrow) < held(by_xla, narrow)


def test_a_search_lays_out_what_the_heads_allow():
    """Six heads of keys do not go over four ways of tensor and context together."""
    found = {(laid.mesh.tensor, laid.mesh.context) for laid in laid_out(run(), Cluster.of(H100, 8), Constraints())}
    assert found == {(1, 1), (2, 1), (1, 2)}
    for laid in laid_out(run(), Cluster.of(H100, 8), Constraints()):
        if laid.mesh.pipeline == 1 and 8 % laid.mesh.size("data", "fsdp") == 0:
            Sketch.of(laid, H100)  # which refuses what does not divide
    with pytest.raises(ShardlmError, match=r"heads=8.* over context=3.*; linear and sparse attention take no ring"):
        check_model(SMALL.transformer(), Rules.make("zero3", MeshSpec(context=3)))
    with pytest.raises(ShardlmError, match=r"tensor=4.*6 heads of the queries and keys of linear attention"):
        search(run(), Cluster.of(H100, 8), Constraints.parse(["mesh.tensor=4"]))


def test_groups_of_mamba_that_devices_share():
    """Two groups over four devices are four, one for each; made whole on all, of which each convolves its own."""
    attention = MambaConfig(8, 2, 64, 32)
    assert [divides(attention, ways) for ways in (1, 2, 3, 4, 8, 16)] == [True, True, False, True, True, False]
    assert [key_heads(attention, ways) for ways in (1, 2, 4)] == [2, 2, 4]
    assert convolved(attention, 4) == 2 * 4 * 64 + 8 * 32
    first, last = projections(attention, 128, 4)
    assert first[1:] == (2 * 2 * 64 + 2 * 2 * 32 + 2, 128) and last[1:] == (128, 2 * 32)
    assert Rule.of_rows(attention, 1024, 1, 4, 2).kernels and not Rule.of_rows(attention, 1024, 1, 4, 4).kernels


def test_a_search_lays_out_what_the_groups_of_mamba_allow():
    model = MODELS["nemotron"](**PICKED["summed-fsdp"]["sizes"])
    found = {(laid.mesh.tensor, laid.mesh.context) for laid in laid_out(run(model), Cluster.of(H100, 8), Constraints())}
    assert found == {(t, c) for t in (1, 2, 4, 8) for c in (1, 2, 4) if t * c <= 8}
    with pytest.raises(ShardlmError, match=r"tensor=16.*the 32 heads of Mamba 2, by whole groups of 8 or parts of one"):
        search(run(model), Cluster.of(H100, 16), Constraints.parse(["mesh.tensor=16"]))


def test_what_is_not_known_of_its_memory_is_said():
    assert not memory(Sketch.of(run(), H100)).doubt
    beside = "dense models that are trained whole"
    cases = (
        ({"model": Pretrained("unread", config=json.dumps(SMALL.to_hf())), "lora": LoraConfig(rank=8)}, beside),
        ({"remat": "none"}, "two repeats of a pattern"),
        (
            {"model": QwenHybridConfig(), "mesh": MeshSpec(fsdp=16), "train": TrainConfig(16, 4096)},
            "over several hosts",
        ),
    )
    for how, words in cases:
        assert words in memory(Sketch.of(run(**how), H100)).doubt


def test_profiles_and_plans_have_one_name_for_such_layers():
    def frames(*places):
        return [Frame(f"/src/shardlm/{file}.py", 1, function) for file, function in places]

    recurring = ("layers/context", "Packed.recur.<locals>.local")
    assert layer_of(frames(("ops/gated_delta", "_within"), recurring)) == "linear attention"
    assert layer_of(frames(("ops/ulysses", "by_heads"), recurring)) == "attention"  # a collective's, told by its kind
    assert layer_of(frames(recurring, ("layers/delta_net", "DeltaNet.__call__"))) == "linear attention"
    assert layer_of(frames(("layers/context", "Packed.attend"))) == "attention"
    for place in (("ops/summed_rows", "_backward"), ("layers/mamba", "Mamba._gated"), ("layers/short_conv", "f")):
        assert layer_of(frames(place)) == "linear attention"
    assert layer_of(frames(("layers/packed", "Packed.convolve_heads.<locals>.local"))) == "linear attention"


def served(**engine) -> ServingCase:
    config = RunConfig(QwenHybridConfig(), precision="bf16", train=TrainConfig(global_batch=8, seq_len=8192))
    return ServingCase(ServedModel.of_config(config), Cluster.of(H100, 1), EngineConfig(**engine), 512, 128)


def test_memory_of_a_request_by_hand():
    case = served(max_num_seqs=64, enable_prefix_caching=False)
    found = serving_memory(case).stages[0]
    state, tokens = 4 * 32 * 128 * 128, 2 * 3 * (2 * 16 + 32) * 128  # float32; three tokens of q, k and v
    assert found.memories == (64 + 1) * 24 * (state + tokens)
    assert found.page == 8 * 16 * 2 * 4 * 256 * 2  # of the eight layers that attend
    assert found.held == found.weights + found.pages + found.memories + found.slots
    halved = dataclasses.replace(case, cluster=Cluster.of(H100, 2)).on(mesh=MeshSpec(tensor=2))
    assert serving_memory(halved).stages[0].memories == found.memories // 2
    with_copies = serving_memory(served(max_num_seqs=64))
    copies, [stage] = with_copies.sizes.snapshots, with_copies.stages
    assert stage.memories == (64 + 1 + copies) * 24 * (state + tokens) and copies > 64


def test_prompts_of_the_gated_delta_rule_by_kernels():
    """In 16 bits and whole chunks; by hand what they read and write of 2,048 tokens."""
    attention = DeltaNetConfig(32, 16, 128, 128)

    def rule(attention=attention, length=2048, itemsize=2):
        return Rule.of_rows(attention, length, 1, 1, itemsize)

    by_channel = dataclasses.replace(attention, by_channel=True)
    without = rule(itemsize=4), rule(by_channel), rule(MambaConfig(32, 16, 128, 64)), rule(length=32)
    assert delta_kernels.fits(rule()) and not any(map(delta_kernels.fits, without))
    rules = Rules.make("replicated", MeshSpec())
    found, plain = ({op.what: op for op in prompt(attention, rules, 1, 2048, size)} for size in (2, 4))
    states, chunks = 32 * 128 * 128, 2048 // 64
    keys, values, rates = 2 * 2048 * 16 * 128, 2 * 2048 * 32 * 128, 4 * 2048 * 32
    carried = keys + 3 * values + rates + 2 * chunks * states + 2 * 4 * states
    assert found["states"].hbm_bytes == carried
    assert "inverse" in plain and "inverse" not in found
    assert found["states"].flops == 2 * 2048 * 32 * 2 * 128 * 128


def test_a_beginning_is_shared_where_a_copy_is_worth_it():
    assert [served().mix.found, dataclasses.replace(served(), shared_prefix=496).mix.found] == [0, 0]
    case = dataclasses.replace(served(), shared_prefix=640, prompt_len=1024)
    assert case.mix.found == 640 and serving_memory(case).sizes.snapshots
    assert dataclasses.replace(case, engine=EngineConfig(enable_prefix_caching=False)).mix.found == 0


def test_decoding_reads_and_writes_what_requests_are_remembered_by():
    case = served(max_num_seqs=64)
    speed = Speed.of(case, serving_memory(case))
    memory, D = QwenHybridConfig().transformer().segments[0].pattern[0], 4096
    own = state_bytes(memory.attention, speed.rules, 2)
    few, many = (layer_work(memory, [], speed.rules, 0.0, Pass(n, n, 4096, 2), D).least_bytes for n in (1, 64))
    assert (few, many) == (2 * own, 64 * 2 * own)
    bounds = [speed.decode(rows, 4096).least for rows in (1, 64)]  # states of 24 layers, keys and values of eight
    of_requests = 63 * (24 * 2 * own + 8 * 4096 * 2 * 4 * 256 * 2)
    assert bounds[1] - bounds[0] == pytest.approx(of_requests / H100.hbm_bytes_per_second, rel=1e-3)  # and embeddings
    assert speed.decode(64, 4096).parts["linear attention"] > 1.8 * speed.decode(8, 4096).parts["linear attention"]
    # Of a layer that does not look back, a chunk takes as long wherever it stands.
    (near, far) = (layer_work(memory, [], speed.rules, 0.0, Pass(2048, 1, at, 2), D).ops for at in (0, 30_000))
    assert near == far and {op.unit for op in near} == {"matmul", "memory"}


def test_a_request_of_mamba_by_hand():
    """Of 12 layers' 32 heads the state, and of values and one group of keys and queries three tokens; two devices have
    a group each."""
    shape = MODELS["granite"](**PICKED["groups-deep"]["sizes"]).transformer()
    config = EngineConfig(max_num_seqs=16, max_model_len=8192, enable_prefix_caching=False)
    case = ServingCase(ServedModel("granite", shape, "bfloat16", 8192), Cluster.of(H100, 1), config, 512, 128)
    state = 4 * 32 * 128 * 64
    assert serving_memory(case).stages[0].memories == 17 * 12 * (state + 2 * 3 * (32 * 64 + 2 * 128))
    halved = dataclasses.replace(case, cluster=Cluster.of(H100, 2)).on(mesh=MeshSpec(tensor=2))
    assert serving_memory(halved).stages[0].memories == 17 * 12 * (state // 2 + 2 * 3 * (16 * 64 + 2 * 128))
    speed = Speed.of(case, serving_memory(case))
    assert speed.decode(16, 4096).parts["linear attention"] > 2 * speed.decode(1, 4096).parts["attention"]


def test_drafts_take_what_their_tokens_do():
    """Beside a request's state its last tokens (ops/delta_drafts.py): 2% of what it takes, for two drafts."""
    engine = EngineConfig(max_num_seqs=64, enable_prefix_caching=False)
    plain = serving_memory(dataclasses.replace(served(), engine=engine))
    engine = dataclasses.replace(engine, speculative_config=SpeculativeConfig(2, "ngram"))
    case = dataclasses.replace(served(), engine=engine, acceptance_rate=0.5)
    found = serving_memory(case)
    more = found.stages[0].memories - plain.stages[0].memories
    token = 2 * (2 * 16 + 32) * 128 + 2 * 4 * 32  # of q, k and v; and its decays and betas, float32
    assert more == (64 + 1) * 24 * (3 * token + 4)  # and where they begin
    assert 0.02 < more / plain.stages[0].memories < 0.03
    fast, slow = Speed.of(case, found), Speed.of(served(max_num_seqs=64), plain)
    assert slow.step_seconds(64, 4096) < fast.step_seconds(64, 4096) < 1.4 * slow.step_seconds(64, 4096)
    assert fast.decode(64, 4096).seconds < slow.decode(64, 4096).seconds  # two tokens a step
