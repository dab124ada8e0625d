"""The zigzag order of a ring, and its meetings of blocks."""

import jax
import jax.numpy as jnp
import numpy as np
from small import mesh_of, relative_error

from shardlm.mesh import MeshSpec
from shardlm.ops import attention_pair
from shardlm.ops.attention import reference
from shardlm.ops.attention_pair import Pair, Side, backward, forward, merge
from shardlm.ops.ring_attention import _meeting, zigzag
from shardlm.rules import Rules


def test_zigzag_gives_each_device_an_early_and_a_late_chunk():
    spec = MeshSpec(context=4)
    with jax.set_mesh(mesh_of(spec)):
        rows = jnp.tile(jnp.arange(16), (2, 1))
        moved = np.asarray(jax.jit(lambda a: zigzag(a, Rules.make("zero1", spec)))(rows))
    assert moved[0].tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]


def test_a_meeting_is_skipped_only_when_the_window_sees_nothing_of_it():
    C, half, window = 4, 8, 12
    index = [np.r_[i * half : (i + 1) * half, (2 * C - 1 - i) * half : (2 * C - i) * half] for i in range(C)]
    for me in range(C):
        for other in range(C):
            distance = index[me][:, None] - index[other][None]
            seen = ((distance >= 0) & (distance < window)).any()
            if me != other:
                assert seen == (int(_meeting(me, other, half, window)) != 0)


def test_two_meetings_make_a_whole_and_the_gradient_needs_the_whole(monkeypatch):
    monkeypatch.setattr(attention_pair, "SCORE_BYTES", 4 * 2 * 4 * 16 * 4)  # four queries at a time
    q, k, v, d_out = (jax.random.normal(jax.random.key(i), (2, 16, n, h)) for i, (n, h) in
                      enumerate([(4, 8), (2, 8), (2, 6), (4, 6)]))  # fmt: skip
    segments = jnp.repeat(jnp.array([[1, 2], [1, 1]]), 8, axis=1)
    expected, back = jax.vjp(lambda *a: reference(*a, segments, 0.3), q, k, v)
    halves = [Side(jnp.arange(16), segments).part(0, 8), Side(jnp.arange(16), segments).part(8, 16)]
    diagonal, before = (Pair(0.3, kind, 0, "xla") for kind in (True, False))
    early = forward(diagonal, q[:, :8], k[:, :8], v[:, :8], halves[0], halves[0])
    late = forward(diagonal, q[:, 8:], k[:, 8:], v[:, 8:], halves[1], halves[1])
    late = merge(late, forward(before, q[:, 8:], k[:, :8], v[:, :8], halves[1], halves[0]))
    out, lse = (jnp.concatenate(parts, axis=1) for parts in zip(early, late, strict=True))
    assert relative_error(out, expected) < 1e-5
    cut = lambda a, part: a[:, :8] if part == 0 else a[:, 8:]  # noqa: E731

    def gradient(pair, i, j):
        whole = [cut(a, i) for a in (out, lse, d_out)]
        return backward(pair, cut(q, i), cut(k, j), cut(v, j), halves[i], halves[j], *whole)

    first, second, across = gradient(diagonal, 0, 0), gradient(diagonal, 1, 1), gradient(before, 1, 0)
    got = (
        jnp.concatenate([first[0], second[0] + across[0]], axis=1),
        *(jnp.concatenate([first[n] + across[n], second[n]], axis=1) for n in (1, 2)),
    )
    assert relative_error(got, back(d_out)) < 1e-5
