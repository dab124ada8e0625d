"""What is trained with a scheme as `matmul` is written by it and served: a run's checkpoint, the folder that convert
makes of it, and the log-probabilities of the trainer's forward pass and of the server."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_moe
from engines import CONFIG, TOKENIZER
from small import init, mesh_of, model_on

import shardlm
from shardlm.checkpoint import CheckpointConfig, Checkpoints
from shardlm.config_json import to_json
from shardlm.hf_files import Folder
from shardlm.layers.packed import Packed
from shardlm.mesh import MeshSpec
from shardlm.opened import prepare
from shardlm.run_files import save_run_files
from shardlm.train import convert
from shardlm.train.config import RunConfig
from shardlm.train.scoring import score
from shardlm.weights import own_tensors

DENSE = dataclasses.replace(CONFIG, embed_dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=256)
EXPERTS = dataclasses.replace(
    small_moe.MOE, vocab_size=CONFIG.vocab_size, embed_dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    expert_dim=128, num_experts=4,
)  # fmt: skip
LATENT = dataclasses.replace(
    small_moe.DEEPSEEK, vocab_size=CONFIG.vocab_size, embed_dim=128, q_latent_dim=128, kv_latent_dim=128, nope_dim=32,
    value_dim=32, rope_dim=16, mlp_dim=256, expert_dim=128,
)  # fmt: skip
SIZES = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 16, "decode_steps": 1}
ROWS = [[int(t) for t in np.random.default_rng(n).integers(0, 256, n)] for n in (9, 30, 17)]


def trained(shape, matmul, folder) -> np.ndarray:
    """Log-probabilities of the rows by the trainer's model, of random weights; these are a run in `folder`."""
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = model_on(MeshSpec(), config=shape, matmul=matmul)
        params = init(model, 3)

        @jax.jit
        def run(params, tokens, length):
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            lm = model.model(params)
            hidden, _, _ = lm(tokens, positions, Packed((positions < length).astype(jnp.int32), model.execution.rules))
            return jax.nn.log_softmax(lm.logits(hidden))[0]

        found = []
        for row in ROWS:
            tokens = np.zeros((1, 32), np.int32)
            tokens[0, : len(row)] = row
            made = np.asarray(run(params, tokens, len(row)))
            found += [made[i, token] for i, token in enumerate(row[1:])]
        save_run_files(folder, to_json(RunConfig(shape, precision="fp32", matmul=matmul, run_dir=str(folder))))
        TOKENIZER.save(folder / "tokenizer.json")
        with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
            checkpoints.save(1, {"params": params}, {}, {})
    return np.array(found)


@pytest.mark.wide
@pytest.mark.parametrize(
    "shape,scheme,how",
    [
        (DENSE, "W4A16", "checkpoint"),
        (DENSE, "W8A16", "checkpoint"),
        (DENSE, "FP8_DYNAMIC", "fp8_dynamic"),
        (DENSE, "W8A8", "int8_dynamic"),
        (EXPERTS, "W4A16", "checkpoint"),
        (LATENT, "W4A16", "checkpoint"),
    ],
    ids=["dense-W4A16", "dense-W8A16", "dense-FP8_DYNAMIC", "dense-W8A8", "experts", "latent"],
)
def test_what_was_trained_is_served(shape, scheme, how, tmp_path):
    expected = trained(shape, scheme, tmp_path / "run")
    convert.to_hf(tmp_path / "run", tmp_path / "few", dtype="float32", quantization=scheme)
    served = shardlm.LLM(tmp_path / "few", quantization=how, dtype="float32", **SIZES).score(ROWS)
    differences = np.abs(np.concatenate([np.array(row) for row in served]) - expected)
    # Sums in another order (measured: 2.4e-6 at most). Activations of 8 bits may fall to the other side of the middle
    # between two numbers then: a step of 2**-4 of an e4m3 number (measured: most 0, at most 0.017), 1/127 in int8.
    assert np.median(differences) < 2e-6
    assert differences.max() < {"checkpoint": 2e-5, "int8_dynamic": 5e-3, "fp8_dynamic": 0.06}[how]


@pytest.mark.wide
def test_another_scheme_is_written_with_searched_scales(tmp_path):
    """What was trained in its own numbers is written in those; of any other run scales are searched."""
    tensor = "model.layers.0.mlp.up_proj.weight"
    found = {}
    for matmul in ("dtype", "W4A16"):
        trained(dataclasses.replace(DENSE, num_layers=1), matmul, tmp_path / matmul)
        assert prepare(tmp_path / matmul).model.execution.matmul == matmul  # as launch.eval has it
        convert.to_hf(tmp_path / matmul, tmp_path / f"{matmul} few", quantization="W4A16")
        found[matmul] = own_tensors(Folder.open(tmp_path / f"{matmul} few"))[tensor].read(...)
    assert not np.array_equal(found["dtype"], found["W4A16"])


def test_a_run_is_scored_as_it_was_trained(tmp_path):
    """By launch.eval's function: as the folder that is written of it, and not as its float32 weights."""
    shape = dataclasses.replace(DENSE, num_layers=1)
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 20)
    for matmul in ("dtype", "W4A16"):
        trained(shape, matmul, tmp_path / matmul)
    convert.to_hf(tmp_path / "W4A16", tmp_path / "few", dtype="float32", quantization="W4A16")

    def loss(checkpoint: str) -> float:
        how = {"mesh": MeshSpec(fsdp=8), "seq_len": 32, "global_batch": 8, "cache_dir": str(tmp_path / "cache")}
        return score(tmp_path / checkpoint, [str(tmp_path / "text.txt")], **how)["loss"]

    exact, rounded, written = map(loss, ("dtype", "W4A16", "few"))
    assert rounded == pytest.approx(written, rel=1e-6) and abs(rounded - exact) > 1e-4 * exact
