"""Prompts are cut for weights in few bits, which are made anew in 16 bits for many tokens."""

import dataclasses
from unittest import mock

import pytest
from engines import CONFIG, END, TOKENIZER
from oracle import opened_of

from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.models.mixtral import MixtralConfig
from shardlm.ops.grouped_weights import ROWS, Groups
from shardlm.ops.weight_format import AsPublished
from shardlm.serve.build import assemble
from shardlm.serve.chunk_programs import Cuts, FewBits, sizes_of
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.few_bits import BLOCK, few_bits_of

SIZES, LLAMA = sizes_of(2048, 256), LlamaConfig().transformer()
DENSE = {"int4": FewBits(256, 128, 64, 256, 320), "int8": FewBits(256, 128, 128, 256, 384)}


def test_what_is_read_and_made_is_by_the_format_and_by_what_multiplies_it():
    assert BLOCK == 2 * ROWS
    assert {how: few_bits_of(LLAMA, how, "pallas") for how in DENSE} == {how: (one,) for how, one in DENSE.items()}
    assert few_bits_of(LLAMA, "fp8", "pallas") == (DENSE["int8"],)
    published = AsPublished((("wq", Groups("fp4", 16, published=True)), ("up", Groups("int4", 128, published=True))))
    assert few_bits_of(LLAMA, published, "pallas") == (DENSE["int4"],)
    for how, products in (("dtype", "pallas"), ("int4", "dequantised"), ("fp8_dynamic", "pallas")):
        assert few_bits_of(LLAMA, how, products) == ()


def test_experts_are_made_anew_for_many_rows_of_each():
    shape = MixtralConfig().transformer()  # two of eight experts: 512 tokens are 128 rows of each
    dense, experts = few_bits_of(shape, "int8", "pallas")
    assert (dense.most, experts.most, experts.block) == (256, 512, 512)
    # A token multiplies 12.6 G of 46.3 G numbers, 11.3 G of them of experts.
    assert experts.whole / 256 == pytest.approx(45.1 / 12.6, rel=0.01)
    assert dense.whole / 256 == pytest.approx(1.34 / 12.6, rel=0.01)
    assert few_bits_of(shape, "int8_dynamic", "pallas") == (experts,)  # projections multiply 8 bits as they are


def cut(how: str, tokens: int, prompts: int = 1) -> list[int]:
    cuts, found = Cuts.of(SIZES, "gpu", (DENSE[how],)), []
    while sum(found) < tokens:
        found.append(cuts.chunk(tokens - sum(found), 2048, prompts))
    return found


@pytest.mark.parametrize(
    ("how", "tokens", "prompts", "chunks"),
    [
        ("int4", 267, 1, [256, 11]),  # made anew for a program of 512 it takes 24 ms, and 14 so (8B, H100; estimated)
        ("int4", 700, 1, [256, 256, 188]),
        ("int4", 1024, 1, [1024]),  # anew once, which is less than four times 256
        ("int4", 2048, 1, [2048]),
        ("int4", 1500, 1, [1024, 256, 220]),
        ("int8", 267, 1, [256, 11]),
        ("int8", 1000, 1, [1000]),
        ("int4", 200, 1, [200]),
        ("int4", 512, 1, [256, 256]),
        ("int4", 512, 4, [512]),  # four make them anew once
        ("int4", 267, 4, [256, 11]),  # as in 16 bits
    ],
)
def test_prompts_are_cut_where_weights_are_multiplied_as_they_are_held(how, tokens, prompts, chunks):
    assert cut(how, tokens, prompts) == chunks


def test_beside_chunks_of_others_and_in_a_crowd_prompts_are_cut_as_in_16_bits():
    few, plain = Cuts.of(SIZES, "gpu", (DENSE["int4"],)), Cuts.of(SIZES, "gpu")
    assert few.chunk(700, 2048) == 256 and plain.chunk(700, 2048) == 512
    for tokens in range(1, 3000, 37):
        for prompts, beside in ((3, False), (1, True)):
            assert few.chunk(tokens, 1900, prompts, beside) == plain.chunk(tokens, 1900, prompts, beside)


def test_every_prompt_is_read_once_in_chunks_that_have_programs():
    for how in DENSE:
        for tokens in range(1, 4500, 7):
            chunks = cut(how, tokens)
            assert sum(chunks) == tokens and min(chunks) > 0 and max(chunks) <= 2048


def test_an_engine_has_the_cuts_of_its_weights_and_of_what_multiplies_them():
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=8, block_size=4, decode_steps=4)
    shape = dataclasses.replace(CONFIG, num_layers=1).transformer()
    for products in ("dequantised", "pallas"):
        opened = opened_of(shape, MeshSpec(), weights="fp8")
        execution = dataclasses.replace(opened.model.execution, few_bits=products)
        opened = dataclasses.replace(opened, model=dataclasses.replace(opened.model, execution=execution))
        with mock.patch("shardlm.serve.build.compile_all"):
            engine = assemble(opened, TOKENIZER, [END], 40, config)
        cuts = engine.scheduler.config.cuts
        assert cuts == engine.runner.config.cuts and cuts.few_bits == few_bits_of(shape, "fp8", products)
        assert bool(cuts.few_bits) == (products == "pallas")
