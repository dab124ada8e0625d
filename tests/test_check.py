"""What is refused before anything compiles: each message has the values and choices that work."""

import dataclasses
import json
import pathlib

import pytest
from small import LLAMA
from small_moe import DEEPSEEK

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.rules import Rules
from shardlm.train.check import (
    check_model,
    check_outside_stages,
    check_pipeline,
    check_positions,
    check_remat,
    check_vocabulary,
)
from shardlm.train.config import PipelineConfig, TrainConfig


def refusal(layers, mesh, schedule="circular", rounds=1, accumulation=8) -> str:
    with pytest.raises(ShardlmError) as caught:
        check_pipeline(layers, TrainConfig(accumulation=accumulation), PipelineConfig(schedule, rounds), mesh)
    return str(caught.value)


def test_a_stage_without_layers_is_refused_with_the_choices():
    assert refusal(6, MeshSpec(pipeline=8)) == (
        "layers=6 cannot be split over pipeline=8: each of 8 places needs one; choose pipeline up to 6"
    )
    message = refusal(6, MeshSpec(pipeline=4), rounds=2)
    assert "pipeline=4 x pipeline.rounds=2: each of 8 places" in message
    assert "choose pipeline up to 3 or fewer rounds" in message


def test_layers_that_do_not_divide_pass():
    for layers, stages, rounds in (
        (61, 8, 1),
        (95, 8, 2),
        (58, 16, 1),
        (58, 4, 4),
        (62, 8, 3),
        (126, 16, 7),
        (6, 4, 1),
    ):
        check_pipeline(layers, TrainConfig(accumulation=16), PipelineConfig(rounds=rounds), MeshSpec(pipeline=stages))


def test_microbatches_fill_the_stages_in_whole_groups():
    message = refusal(8, MeshSpec(pipeline=4), accumulation=6)
    assert "train.accumulation=6 microbatches do not fill pipeline=4" in message and "choose 4 or 8" in message


def test_rounds_are_positive():
    with pytest.raises(ShardlmError, match=r"pipeline.rounds=0: it must be at least 1"):
        PipelineConfig(rounds=0)


def test_what_one_f_one_b_keeps_is_not_chosen():
    with pytest.raises(ShardlmError, match=r"remat=dots with pipeline.schedule=1f1b: .* set remat=full"):
        check_remat("dots", PipelineConfig("1f1b"), MeshSpec(pipeline=2))
    check_remat("full", PipelineConfig("1f1b"), MeshSpec(pipeline=2))
    check_remat("dots", PipelineConfig("1f1b"), MeshSpec())
    check_remat("dots", PipelineConfig("gpipe"), MeshSpec(pipeline=2))


def test_a_ring_in_layers_that_one_stage_runs_is_refused():
    one_f_one_b, mesh = PipelineConfig("1f1b"), MeshSpec(pipeline=2, context=2)
    further = dataclasses.replace(DEEPSEEK, num_layers=2, dense_layers=0, mtp=1)
    for config in (DEEPSEEK, further):
        with pytest.raises(ShardlmError, match=r"schedule=1f1b with context=2: 1 of the model's layers are outside"):
            check_outside_stages(config.transformer(), one_f_one_b, mesh, "ring")
    check_outside_stages(LLAMA.transformer(), one_f_one_b, mesh, "ring")
    check_outside_stages(further.transformer(), one_f_one_b, mesh, "ulysses")
    check_outside_stages(further.transformer(), PipelineConfig(), mesh, "ring")


def test_rows_beyond_learned_positions_are_refused():
    learned = dataclasses.replace(LLAMA.transformer(), max_positions=64)
    check_positions(64, learned)
    check_positions(1 << 20, LLAMA.transformer())
    with pytest.raises(ShardlmError, match=r"seq_len=65 is more than the 64 positions .* choose at most 64"):
        check_positions(65, learned)


def test_a_tokenizer_larger_than_a_checkpoint_is_told_where_its_own_is():
    shape = LLAMA.transformer()
    with pytest.raises(ShardlmError, match=r"set data\.tokenizer to base"):
        check_vocabulary(shape, shape.vocab_size + 1, "base")


def test_sparse_attention_in_a_ring_is_refused():
    folder = pathlib.Path(__file__).parent / "hf" / "references" / "deepseek_v32"
    model = registry.transformer(json.loads((folder / "config.json").read_text()))
    rules = Rules.make("zero3", MeshSpec(context=2))
    check_model(model, rules, "auto")
    with pytest.raises(ShardlmError, match=r"context_attention=ring: .* set context_attention to auto or ulysses"):
        check_model(model, rules, "ring")
