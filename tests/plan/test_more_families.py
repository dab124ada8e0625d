"""Plans of families whose layers are unlike others' (more_families.py), by hand: short convolutions, Mamba 2 beside
attention, gates, streams. Compiled programs are the other files' (random_runs.py)."""

import dataclasses
import functools

import pytest
from more_families import MODELS, PICKED, SERVED
from random_runs import run_of

from shardlm.hardware import GPUS
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.mesh import MeshSpec
from shardlm.plan.activations import kept, layer
from shardlm.plan.cluster import Cluster
from shardlm.plan.compute import operations
from shardlm.plan.constraints import Constraints
from shardlm.plan.memory import memory
from shardlm.plan.program_layers import buffers_filled, filled
from shardlm.plan.program_traffic import program_traffic
from shardlm.plan.serving.answer import answer_serving
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.ops import Pass, layer_work
from shardlm.plan.serving.report.data import to_json
from shardlm.plan.serving.report.text import to_text
from shardlm.plan.serving.time import Speed
from shardlm.plan.serving.weights import InUse, weights_of
from shardlm.plan.sketch import Sketch
from shardlm.plan.sparse_attention import chooser_of, chosen_bytes
from shardlm.plan.ways import laid_out
from shardlm.serve.engine_config import EngineConfig
from shardlm.serving_rules import serving_rules

H100 = GPUS["h100"]
OF = {run["model"]: name for name, run in PICKED.items()}  # a run of each


@functools.cache
def shape(model: str):
    return (MODELS | SERVED)[model](**PICKED[OF[model]]["sizes"]).transformer()


@pytest.mark.parametrize("name", ["convolved-fsdp", "beside-fsdp", "predicted-fsdp", "shortcut-fsdp", "lightning-fsdp"])
def test_every_weight_multiplies_every_token(name):
    sketch = Sketch.of(run_of(PICKED[name]), H100)
    mine = [op for op in operations(sketch) if op.unit == "matmul" and not op.both and op.layer != "optimizer"]
    found = sum(op.flops * op.forward for op in mine)
    assert found == pytest.approx(2 * sketch.tokens * sketch.shape.parameters_per_token(), rel=1e-9)


@pytest.mark.parametrize("model", MODELS | SERVED)
def test_every_weight_multiplies_every_token_that_is_served(model):
    own, rules, one = shape(model), serving_rules(shape(model), MeshSpec()), Pass(32, 32, 4096, 2)
    weights, D = weights_of(own, MeshSpec(), "bfloat16", "dtype"), own.embed_dim
    for block, of_layer in zip(own.blocks(), weights.layers, strict=True):
        work = layer_work(block, [InUse.of(held, rules) for held in of_layer], rules, 1.0, one, D)
        flops = sum(op.flops * op.count for op in work.ops if op.unit == "matmul")
        many = block.parameters_per_token(D) + (2 * D * block.inputs.dim if block.inputs else 0)
        # Of streams, of an indexer and of one head's gates and rates numbers are made by products that are little.
        assert flops == pytest.approx(2 * 32 * many, rel=0.05)


@pytest.mark.parametrize(
    ("model", "words"),
    [("own blocks", "kv heads that choose blocks for themselves"), ("shortcut", "added a layer later"), ("gated", "")],
)
def test_what_was_not_compared_of_a_served_model_is_said(model, words):
    served, engine = ServedModel(model, shape(model), "bfloat16", 8192), EngineConfig(max_num_seqs=64)
    told = to_json(answer_serving(ServingCase(served, Cluster.of(H100, 1), engine, 512, 128)))
    assert words in told["doubt"] and bool(words) == bool(told["doubt"]) == ("In doubt: " in to_text(told))


def test_what_short_convolutions_remember_by_hand():
    """Of each request and of padding two tokens of eight layers, whole or halved over tensor; decoding reads and writes
    them, and prompts look back no farther."""
    engine = EngineConfig(max_num_seqs=64, max_model_len=8192, enable_prefix_caching=False)
    case = ServingCase(ServedModel("lfm2", shape("convolved"), "bfloat16", 8192), Cluster.of(H100, 1), engine, 512, 128)
    assert serving_memory(case).stages[0].memories == 65 * 8 * 2 * 2 * 2048
    halved = dataclasses.replace(case, cluster=Cluster.of(H100, 2)).on(mesh=MeshSpec(tensor=2))
    assert serving_memory(halved).stages[0].memories == 65 * 8 * 2 * 2 * 1024
    speed = Speed.of(case, serving_memory(case))
    convolves = shape("convolved").segments[0].pattern[0]
    assert isinstance(convolves.attention, ShortConvConfig)
    least = layer_work(convolves, [], speed.rules, 0.0, Pass(8, 8, 4096, 2), 2048).least_bytes
    assert least == 8 * 2 * (2 * 2 * 2048)
    near, far = (layer_work(convolves, [], speed.rules, 0.0, Pass(2048, 1, at, 2), 2048).ops for at in (0, 30_000))
    assert near == far


def test_devices_give_each_other_two_tokens_of_a_row():
    sketch = Sketch.of(run_of(PICKED["convolved-context"]), H100)
    found = [sent for sent in program_traffic(sketch) if sent.why == "tokens before"]
    rows, layers, passes = 2, 8, 3  # forward, again, and gradients
    assert sum(sent.nbytes for sent in found) == passes * layers * rows * 2 * 2048 * 2
    assert {sent.kind for sent in found} == {"collective-permute"}


def test_a_search_splits_convolutions_over_tensor_alone():
    """Attention's eight heads of keys limit context."""
    config = dataclasses.replace(run_of(PICKED["convolved-fsdp"]), mesh=MeshSpec())
    found = {(laid.mesh.tensor, laid.mesh.context) for laid in laid_out(config, Cluster.of(H100, 8), Constraints())}
    assert {(8, 1), (1, 4), (2, 4)} <= found


def test_what_is_not_known_of_their_memory_is_said():
    for name, words in (("convolved-fsdp", "short convolutions were"), ("beside-fsdp", "Mamba 2 beside attention was")):
        run = run_of(PICKED[name])
        assert not memory(Sketch.of(run, H100)).doubt
        for changes in ({"remat": "dots"}, {"mesh": MeshSpec(data=2, fsdp=1)}):
            assert words in memory(Sketch.of(dataclasses.replace(run, **changes), H100)).doubt


def test_a_token_computes_in_the_experts_that_are_no_idle_ones():
    """Four choices among 16 experts and 8 that give back what they read: on average 8 thirds of them compute."""
    moe = next(block.mlp for block in shape("shortcut").kinds if block.mlp.num_experts)
    run = run_of(PICKED["shortcut-fsdp"])
    sketch = Sketch.of(run, H100)
    up = next(op for op in operations(sketch) if op.grouped and op.what == "up")
    assert moe.working == pytest.approx(8 / 3)
    assert up.flops == pytest.approx(2 * sketch.tokens * 8 / 3 * 2048 * 2 * 768)
    more = dataclasses.replace(run.train, global_batch=8)
    sent = Sketch.of(dataclasses.replace(run, train=more, mesh=MeshSpec(expert=8)), H100)
    assert filled(moe, 8, 4096) == pytest.approx(8 / 3 / 8 / 2)  # of buffers for two experts' worst case
    assert buffers_filled(sent) == filled(moe, 8, sent.tokens)


def test_what_is_added_later_goes_by_beside_the_stream():
    """Twice the stream is kept of each layer, and once more what attention adds to one of both."""
    sketch = Sketch.of(run_of(PICKED["shortcut-fsdp"]), H100)
    one = layer(sketch.shape.kinds[0], sketch)
    stream = 4096 * 2048 * 2
    assert (one.stream, one.later, one.one) == (2 * stream, stream, 0)
    for remat, streams in (("full", 2), ("names", 3), ("dots", 3)):
        kept_so = dataclasses.replace(run_of(PICKED["shortcut-fsdp"]), remat=remat)
        assert kept(one, Sketch.of(kept_so, H100))["streams kept"] == streams * stream


def test_kv_heads_that_choose_for_themselves_have_a_mask_each():
    """Of rows longer than the 1,024 tokens that they attend to; shorter ones are attended to whole."""
    run = run_of(PICKED["own-blocks-fsdp"])
    sketch, T = Sketch.of(run, H100), 4096
    chooses = next(block.attention for block in sketch.shape.kinds if block.attention.indexer)
    assert chosen_bytes(chooses, sketch) == 4 * T**2
    split = Sketch.of(dataclasses.replace(run, mesh=MeshSpec(fsdp=2, tensor=2)), H100)
    assert chosen_bytes(chooses, split) == 2 * T**2
    short = Sketch.of(dataclasses.replace(run, train=dataclasses.replace(run.train, seq_len=1024)), H100)
    assert chosen_bytes(chooses, short) == 0 and chooser_of(chooses, short) is None
    scores = {op.what: op for op in operations(sketch)}["index scores"]
    assert scores.flops == 2 * sketch.tokens * 4 * T * 128  # each head with all tokens


def test_pools_of_tokens_have_one_key_each():
    sketch = Sketch.of(run_of(PICKED["pools-fsdp"]), H100)
    found = {op.what: op for op in operations(sketch)}
    assert found["index scores"].flops == 2 * 4096 * 16 * (4096 // 16) * 128
    assert found["index keys"].flops == 2 * 4096 * 2 * 128 * 2048  # keys, and what they weigh in their pool


def test_layers_of_which_none_is_like_another_are_in_no_loop():
    """MiniMax's decays are each layer's own: gradients of the others are there when the first layer is done."""
    sketch = Sketch.of(run_of(PICKED["lightning-fsdp"]), H100)
    assert not sketch.loops and Sketch.of(run_of(PICKED["pools-fsdp"]), H100).loops
    layers = sum(4 * w.numbers(sketch.rules.rest) for w in sketch.weights if w.segment is not None)
    assert memory(sketch).kinds["gradients"] == pytest.approx(3 / 4 * layers)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shortcut-fsdp", "mixtures that are added a layer later"),
        ("lightning-fsdp", "lightning attention"),
        ("own-blocks-fsdp", "kv heads that choose blocks"),
        ("pools-fsdp", "chosen pools of tokens"),
    ],
)
def test_what_was_compared_of_the_newest_is_said(name, words):
    run = run_of(PICKED[name])
    assert words not in memory(Sketch.of(run, H100)).doubt
    for changes in ({"remat": "dots"}, {"mesh": MeshSpec(data=2, fsdp=1)}):
        assert words in memory(Sketch.of(dataclasses.replace(run, **changes), H100)).doubt
