"""Attention compiled for GPUs that are not there: of latents, and with sinks, cuDNN's where the target has kernels for
its heads, whatever this process runs on; and planned as it is compiled."""

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import MARKS

from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.models.llama import LlamaConfig
from shardlm.ops import cudnn_groups
from shardlm.ops.attention import cudnn
from shardlm.ops.cudnn_heads import traced_for
from shardlm.plan.sketch import Sketch
from shardlm.topology import topology
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program

pytestmark = MARKS
HEADS = {"q_latent_dim": 64, "kv_latent_dim": 64, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}  # DeepSeek V3's
SIZES = {"vocab_size": 256, "embed_dim": 64, "num_layers": 2, "dense_layers": 1, "num_heads": 2, "mlp_dim": 64}
CONFIG = RunConfig(
    DeepseekConfig(**SIZES, **HEADS, num_experts=4, groups=1, top_groups=1, top_k=2, expert_dim=64),
    train=TrainConfig(global_batch=1, seq_len=512, accumulation=1),
    mesh=MeshSpec(fsdp=1),
    remat="none",
)


@pytest.mark.parametrize("gpu,kernels", [("a100", 0), ("h100", 1), ("b200", 1)])
def test_heads_of_192_with_values_of_128(gpu, kernels):
    """In the scan over layers; XLA's compiler is asked for attention alone, as experts take it half a minute."""
    devices = topology(gpu, 1, 1)
    lowered = Program.make(CONFIG, CONFIG.mesh.build(devices)).lower_step().as_text()
    found = [lowered.count(f"@__cudnn$fmhaScaleBiasSoftmax{way}(") for way in ("", "Backward")]
    assert found == [2 * kernels, 2 * kernels]  # of the dense layer and of the one with experts
    assert Sketch.of(CONFIG, GPUS[gpu]).execution.attention == ("cudnn" if kernels else "xla")
    if kernels:
        assert compiled_attention(devices[0]).count("__cudnn$fmhaScaleBiasSoftmax") == 2


@pytest.mark.parametrize(("gpu", "ways"), [("a100", 2), ("h100", 4)])
@pytest.mark.parametrize(("remat", "passes"), [("dots", 1), ("full", 2)])
@pytest.mark.parametrize("grouped", [False, True])
def test_packed_documents_are_told_to_the_kernel(gpu, ways, remat, passes, grouped, monkeypatch):
    """One a row, two numbers of them on Hopper, and by a bias; remat=dots keeps what the kernel gave. Gradients of a
    group at a time are in loops, of a program as small."""
    monkeypatch.setattr(cudnn_groups, "CALL_BYTES", 0 if grouped else 2**30)
    model = LlamaConfig(256, 128, 2, 2, 1, 64, 128)
    train = TrainConfig(global_batch=1, seq_len=1024)
    config = RunConfig(model, train=train, mesh=MeshSpec(fsdp=1), remat=remat)
    text = Program.make(config, config.mesh.build(topology(gpu, 1, 1))).lower_step().as_text()
    count = lambda name, back: text.count(f"@__cudnn$fmha{name}{'Backward' * back}(")  # noqa: E731
    assert [count("Softmax", True), count("ScaleBiasSoftmax", True)] == [ways - 1, 1]
    assert [count("Softmax", False), count("ScaleBiasSoftmax", False)] == [passes * (ways - 1), passes]
    halves = text.count("(tensor<1x1024x1x64xbf16>, tensor<1x1024x1x64xbf16>, ")
    assert (halves > 0) == (grouped and gpu == "h100")


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_sinks_beside_the_kernels(gpu):
    """No scores are materialised: but for the bias of documents nothing has rows and columns of tokens."""
    text = compiled_attention(topology(gpu, 1, 1)[0], width=64, window=100, sinks=True)
    assert text.count("__cudnn$fmhaScaleBiasSoftmax") == 2
    assert "1,1,512,512]" in text and "1,2,512,512]" not in text


def compiled_attention(device: jax.Device, width: int = 192, window: int = 0, sinks: bool = False) -> str:
    """The program of attention and its gradients alone."""
    on = jax.sharding.SingleDeviceSharding(device)
    q, v = (jax.ShapeDtypeStruct((1, 512, 2, size), jnp.bfloat16, sharding=on) for size in (width, min(width, 128)))
    documents = jax.ShapeDtypeStruct((1, 512), jnp.int32, sharding=on)
    sink = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=on) if sinks else None

    def run(q, k, v, sink, documents):
        return cudnn(q, k, v, documents, 0.1, window, sink).astype(jnp.float32).sum()

    with traced_for(device):
        return jax.jit(jax.grad(run, (0, 1, 2, 3))).lower(q, q, v, sink, documents).compile().as_text()
