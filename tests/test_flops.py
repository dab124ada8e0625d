"""The FLOP convention against counting by brute force, and against figures worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm import flops

LENGTHS = st.lists(st.integers(0, 20), max_size=5)


@given(LENGTHS, st.none() | st.integers(1, 25))
def test_pairs_are_those_that_the_mask_lets_through(lengths, window):
    reach = window or 100
    counted = sum(q - reach < k <= q for n in lengths for q in range(n) for k in range(n))
    assert flops.attention_pairs(lengths, window) == counted


@given(LENGTHS)
def test_packing_adds_no_pairs_between_documents(lengths):
    assert flops.attention_pairs(lengths) == sum(flops.attention_pairs([n]) for n in lengths)
    assert flops.attention_pairs(lengths) <= flops.attention_pairs([sum(lengths)])


def test_a_training_step_is_six_flops_a_parameter_a_token_and_half_of_square_attention():
    tokens, layers, heads, head_dim, params = 512, 3, 4, 16, 1_000_000
    attention = layers * flops.attention_pairs([tokens]) * flops.attention_width(heads, head_dim)
    # PaLM's appendix B counts the full square.
    palm = 6 * params * tokens + 12 * layers * heads * head_dim * tokens * tokens
    square_only = palm - 6 * params * tokens
    ours = flops.training_flops(params, tokens, attention)
    assert ours == 6 * params * tokens + square_only * (tokens + 1) / (2 * tokens)
    assert flops.training_flops(params, tokens) == 3 * flops.forward_flops(params, tokens)
    weights = flops.forward_flops(params, tokens)  # whose gradients adapters do without
    assert flops.training_flops(params, tokens, attention, frozen=True) == pytest.approx(ours - weights)


def test_latent_attention_has_two_widths():
    assert flops.attention_width(128, 192, 128) == 128 * (192 + 128)
    assert flops.attention_width(8, 64) == 2 * 8 * 64


def test_mfu_is_a_fraction_of_the_peak_of_all_devices():
    assert flops.mfu(flops=8e15, seconds=2.0, peak_flops_per_second=1e15, devices=8) == pytest.approx(0.5)
