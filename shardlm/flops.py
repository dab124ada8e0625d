"""The one FLOP convention of the project, in plain numbers and without jax: *model* FLOPs, the arithmetic
that the mathematics of a step asks for, however it is executed. Who calls counts parameters, tokens and
pairs; peak rates of devices come from the caller too.

The convention, for one training step (a multiply and an add are two FLOPs):

- Matrix multiplications: forward 2, backward 4, together ``6 x matmul_params x tokens``. `matmul_params`
  are the parameters that multiply a token's activation: every projection and the output head (also where it
  is tied to the embedding); of a mixture of experts only the experts that a token visits. The embedding
  *lookup* is no multiplication and is not counted, nor are norms, biases, rotary embedding, softmax, loss
  or optimizer. Beside adapters weights have no gradients: backward 2, and what adapters multiply, about
  a hundredth, is not counted.
- Attention: for each (query, key) pair that the mask lets through, ``q . k`` and ``probability x v`` cost
  ``2 x heads x (qk_dim + v_dim)`` forward a layer, that is 4 x heads x head_dim where the two widths are
  one, and three times that with the backward. Causal attention therefore counts the unmasked half only, a
  packed document only its own tokens, a sliding window only what it sees.
- Linear attention by the gated delta rule (ops/gated_delta.py): for each token a head's state [qk_dim, v_dim] is read
  by the key, changed by key and new value, and read by the query: ``3 x 2 x heads x qk_dim x v_dim`` forward a layer,
  and three times that with the backward, however long the text is. That is the rule as it is written for one token;
  what chunks of tokens multiply besides is how it is executed, and the convolution before it is elementwise. Mamba 2
  (ops/summed_states.py) does not read by the key: two products.
- Padding tokens are not counted. Recomputation (rematerialisation, flash attention's second q . k) is not
  counted: the ratio to the peak is model FLOP utilisation (MFU), not hardware FLOP utilisation (HFU).

The 6N rule and MFU are those of PaLM (Chowdhery et al. 2022, appendix B), whose attention term 12 L H Q T
counts the masked half as well: for an 8B Llama its MFU reads 3% higher than ours at 2k tokens, 13% at 8k,
36% at 32k. Megatron (Narayanan et al. 2021, appendix) also counts the full square and adds the recomputed
forward. Halving for the causal mask follows FlashAttention-2 (Dao 2023, section 4.1). Of the gated delta rule Megatron
and MaxText (2026) count four products of a state's size a token, k k^T as one by itself, and the convolution.
"""


def attention_pairs(lengths: list[int], window: int | None = None) -> int:
    """(query, key) pairs of causal attention in one layer over documents of these lengths, in tokens.

    `window` is the number of keys that a query of a sliding-window layer sees, itself included.
    """
    if window is None:
        return sum(n * (n + 1) // 2 for n in lengths)
    capped = [(min(n, window), max(n - window, 0)) for n in lengths]
    return sum(ramp * (ramp + 1) // 2 + full * window for ramp, full in capped)


def attention_width(heads: int, qk_dim: int, v_dim: int | None = None) -> int:
    """Multiply-adds of one layer for one (query, key) pair of `heads` query heads."""
    return heads * (qk_dim + (qk_dim if v_dim is None else v_dim))


def memory_width(heads: int, qk_dim: int, v_dim: int, takes_back: bool = True) -> int:
    """Multiply-adds of one layer of linear attention for one token: of `heads` heads of values. `takes_back`: the delta
    rule, not Mamba 2."""
    return (3 if takes_back else 2) * heads * qk_dim * v_dim


def forward_flops(matmul_params: int, tokens: float, attention_macs: float = 0) -> float:
    """Model FLOPs of one forward pass; the arguments are those of `training_flops`."""
    return 2 * matmul_params * tokens + 2 * attention_macs


def training_flops(matmul_params: int, tokens: float, attention_macs: float = 0, *, frozen: bool = False) -> float:
    """Model FLOPs of one training step, forward and backward, by the convention of this module.

    `tokens` are those of the whole global batch, without padding. `attention_macs` is the sum over the layers
    of ``pairs * attention_width(...)``, where pairs are those of the whole batch: `attention_pairs` of its
    document lengths, or the sum of ``position + 1`` over its tokens; and over those of linear attention of
    ``tokens * memory_width(...)``. `frozen`: only adapters are trained.
    """
    of_weights = 0 if frozen else forward_flops(matmul_params, tokens)
    return 2 * forward_flops(matmul_params, tokens) + of_weights + 3 * forward_flops(0, tokens, attention_macs)


def mfu(flops: float, seconds: float, peak_flops_per_second: float, devices: int) -> float:
    """Model FLOP utilisation, a fraction of 1: `flops` done in `seconds` over the peak of `devices`.

    `peak_flops_per_second` is that of one device, dense, in the dtype that the multiplications ran in.
    """
    return flops / (seconds * peak_flops_per_second * devices)
