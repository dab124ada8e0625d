"""Where the estimate of memory may be farther than 5% from the compiled program: kinds of runs that no recorded program
(tests/plan/compiled_memory.json) is of, or that XLA compiles as it likes."""

from shardlm.layers.head_indexer import HeadIndexerConfig
from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.lightning import LightningConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.pooled_indexer import PooledIndexerConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.layers.shortcut import ShortcutConfig
from shardlm.ops.schemes import SCHEMES
from shardlm.optim import ELEMENTWISE
from shardlm.plan.activations import Kinds, exchanges
from shardlm.plan.adapted import ALL, WAITING
from shardlm.plan.linear_attention import Rule
from shardlm.plan.sketch import Sketch
from shardlm.plan.sparse_attention import chosen_bytes

SCORES = 0.035  # part of all bytes above which scores of XLA's attention decide
ROOM = 0.92  # of a GPU's memory (DeepSeek V3 with accumulation=4 takes 0.87 by the estimate, and 8% less compiled)
UNSURE = 0.05  # of all bytes
FEW = 2048  # tokens of a GPU and microbatch, of adapters
SMALL = 2**20  # numbers that a layer's last product gives: 64 tiles of 128 x 128, for half of a GPU's multiprocessors
TOKENS = 65_536  # of a GPU and microbatch: as many as recorded runs that are within 5% have


def doubt(sketch: Sketch, kinds: Kinds, zeros: float) -> str:
    """The reasons, joined, of a step with this estimate; "" where nothing speaks against it. `zeros` are bytes of it
    that are there only if XLA makes zeros of gradients before the head (temporaries.py)."""
    config, shape, nbytes = sketch.config, sketch.shape, sum(kinds.values())
    ring = sketch.mesh.context > 1 and sketch.execution.context_attention == "ring"
    small = ring or shape.compressed or sketch.execution.attention != "xla"
    scores = 0 if small else kinds.get("attention", 0)
    exchanged = config.slow_link.compression != "none" and not config.local_sgd.inner_steps
    reasons = {
        "it is more than the GPU has room for, and XLA makes some of it twice to need less": (
            nbytes > ROOM * sketch.gpu.hbm_bytes
        ),
        "XLA's attention holds scores of as many layers as it likes, half as much again at worst": scores
        > SCORES * nbytes,
        # 8B over 8 GPUs: with 6,144 and 8,192 tokens as many before it as are counted, with 2,048 and 4,096 fewer.
        f"XLA may make zeros of gradients behind the output head, for up to {zeros / nbytes:.0%} less": (
            zeros > UNSURE * nbytes and config.remat == "full" and not exchanges(sketch)
        ),
        f"a GPU has {sketch.tokens:,.0f} tokens at a time, more than in any recorded run": sketch.tokens > TOKENS,
        # tiny_hybrid: two products of 512 tokens give f32[4,512,128], four parts of each sum.
        "XLA splits the sums of small products and keeps their parts: 7 to 11% more (6 small models in float32; two on "
        "one GPU each needed 17 and 27% less)": sketch.tokens * shape.embed_dim < SMALL,
        "remat=none with tensor copies what several rows keep whole, one array at a time or two: up to 6% more "
        "(8B, 12 layers, fsdp=2 x context=2 x tensor=2)": (
            config.remat == "none" and sketch.mesh.tensor > 1 and sketch.rows > 1
        ),
        "over PCIe several collectives are under way, and beside a sequence split over tensor 3 to 9% more was needed "
        "(5 compiled programs)": sketch.mesh.tensor > 1 and _over_pcie(sketch),
        "entries that stand for several tokens needed 15% less to 12% more (12 compiled programs)": shape.compressed,
        "adapters and muon were not compared with entries that stand for several tokens": (
            shape.compressed and (config.lora.rank > 0 or config.optim.name == "muon")
        ),
        **_of_the_update(sketch),
        **_of_adapters(sketch),
        **_of_linear_attention(sketch),
        **_of_other_layers(sketch),
        **_of_newest(sketch),
        "weights rounded to what will be served (matmul=W4A16 and so on) were compared in one dense model over fsdp "
        "with remat=full alone (3 compiled programs)": config.matmul in SCHEMES
        and (_other_than(sketch) or any(block.mlp.num_experts for block in shape.kinds)),
        "preference training without a reference, or on single answers, was not compared": (
            config.preference.beta > 0 and (not config.preference.compares or config.preference.loss == "kto")
        ),
        "a forward pass beside the model that is trained was compared with dense Llamas and remat=full over fsdp, "
        "tensor and context alone, of adapters on 16 bits": _beside_otherwise(sketch),
        "training on rewards was not compared, and the seconds are without sampling": bool(config.grpo.reward),
        "modules that predict further tokens were not compared": shape.mtp is not None,
        "steps with compressed exchanges were not compared": exchanged,
        f"unroll={config.unroll} was compared with remat=dots, dense models of up to 16 layers, one host and one "
        "microbatch alone, and needed 7% more with 32 layers": config.unroll != 1 and not _without_loop(sketch),
        f"xla_profile={config.xla_profile} was not compared": config.xla_profile in ("none", "cpu"),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def _of_the_update(sketch: Sketch) -> dict[str, bool]:
    """Of optimizers, and of state that rests in the host's memory."""
    config = sketch.config
    return {
        "muon is up to 6% off where experts see the tokens of all devices (Mixtral, 8 layers, fsdp=4 x expert=2)": (
            config.optim.name == "muon" and "gather" in exchanges(sketch)
        ),
        "moments in 8 bits in the host's memory needed 8% more on one GPU (Llama 3 8B, rows of 8,192)": (
            config.optim.moments == "int8" and config.offload.optimizer and sketch.num_gpus == 1
        ),
        "weights on the host were compared in dense models over fsdp and context with remat=full and one microbatch "
        "alone": config.offload.params
        and (_other_than(sketch, "context") or any(block.mlp.num_experts for block in sketch.shape.kinds)),
        "what muon and adafactor bring from the host at once was compared in one program, on one GPU": (
            config.offload.optimizer and config.optim.name not in ELEMENTWISE
        ),
        "muon was not compared with latent attention": (config.optim.name == "muon" and _latent(sketch)),
    }


def _of_adapters(sketch: Sketch) -> dict[str, bool]:
    config = sketch.config
    return {
        "adapters beside experts whose rows are sent or latent attention were compared over fsdp and expert with "
        "remat=full alone": _unlike_adapted(sketch),
        "adapters on few bits beside experts whose rows are not sent needed up to 19% less (2 of 6 compiled "
        "programs)": config.lora.base != "dtype" and bool(exchanges(sketch) & {"local", "gather"}),
        f"adapters over data with {sketch.tokens:,.0f} tokens at a time may need up to 10% less": _between(sketch),
        f"adapters on few bits over several GPUs with no more than {FEW:,} tokens at a time were up to 8% off (2 of 5 "
        "compiled programs)": config.lora.rank > 0
        and config.lora.base != "dtype"
        and sketch.num_gpus > 1
        and sketch.tokens <= FEW,
    }


def _over_pcie(sketch: Sketch) -> bool:
    """As xla_options.py has it."""
    return sketch.gpu.nvlink_domain < sketch.num_gpus <= sketch.gpus_per_host


def _beside_otherwise(sketch: Sketch) -> bool:
    """Of a reference that preferences are compared with, and of a teacher."""
    config, other = sketch.config, sketch.beside
    if other is None or config.grpo.reward:
        return False
    plain = config.remat == "full" and config.lora.base == "dtype" and config.unroll == 1 and sketch.mesh.data == 1
    alike = all(
        not block.mlp.num_experts and block.norms == "pre" for block in (*sketch.shape.kinds, *other.shape.kinds)
    )
    return not (plain and alike) or sketch.shape.remembers or other.shape.remembers


def _of_other_layers(sketch: Sketch) -> dict[str, bool]:
    """Of layers and streams that few recorded programs have."""
    config, shape = sketch.config, sketch.shape
    return {
        "Mamba 2 beside attention was compared over fsdp and tensor with remat=full and one microbatch alone": (
            shape.both and _other_than(sketch, "tensor")
        ),
        "short convolutions were compared over fsdp, tensor and context with remat=full and one microbatch alone": (
            _convolves(sketch) and _other_than(sketch, "tensor", "context")
        ),
        "frequencies that are learned were compared over fsdp with remat=full, without experts (1 program)": bool(
            shape.frequencies
        ),
        "decays by channel without a latent were compared over fsdp, without experts (1 program)": any(
            getattr(block.attention, "straight", False) for block in shape.kinds
        ),
        "short convolutions with norms behind layers were not compared": (
            _convolves(sketch) and any(block.norms != "pre" for block in shape.kinds)
        ),
        "streams that are not mixed needed 6% more (1 compiled program, without experts)": (
            isinstance(shape.streams, StreamsConfig) and not shape.streams.iterations
        ),
        "chosen tokens with remat=dots, in stages or shared by layers were not compared": (
            any(chosen_bytes(block.attention, sketch) for block in shape.kinds)
            and (config.remat == "dots" or sketch.mesh.pipeline > 1 or shape.shared_choice)
        ),
        "tokens gathered over more GPUs of a host than they have experts, beside latent attention, needed 7% more (1 "
        "compiled program)": sketch.execution.gathers_tokens
        and _latent(sketch)
        and any(0 < getattr(block.mlp, "top_k", 0) < sketch.mesh.expert for block in shape.kinds),
        "inputs of each layer's own were compared with remat=full, fsdp, tensor and one microbatch alone": (
            shape.inputs is not None
            and (config.remat != "full" or sketch.passes > 1 or sketch.mesh.data > 1 or config.lora.rank > 0)
        ),
    }


def _of_newest(sketch: Sketch) -> dict[str, bool]:
    """Of layers of which a program or two were compiled, over these axes beside fsdp."""
    kinds, T = sketch.shape.kinds, sketch.config.train.seq_len
    choosers = [own for block in kinds if (own := getattr(block.attention, "indexer", None)) and own.top_k < T]
    there = {
        "mixtures that are added a layer later, which over expert needed 8% less (1 compiled program)": (
            any(isinstance(one.streams, ShortcutConfig) for one in kinds),
            ("tensor",),
        ),
        "lightning attention": (any(isinstance(one.attention, LightningConfig) for one in kinds), ("expert",)),
        "kv heads that choose blocks for themselves, which over tensor needed 6% less (1 compiled program)": (
            any(isinstance(one, HeadIndexerConfig) for one in choosers),
            (),
        ),
        "chosen pools of tokens, which over tensor needed 9% less (1 compiled program)": (
            any(isinstance(one, PooledIndexerConfig) for one in choosers),
            (),
        ),
    }
    return {
        f"{name}: compared over {', '.join(('fsdp', *axes))} with remat=full and one microbatch alone": (
            holds and _other_than(sketch, *axes)
        )
        for name, (holds, axes) in there.items()
    }


def _of_linear_attention(sketch: Sketch) -> dict[str, bool]:
    """{reason: whether it holds} of layers that remember, Mamba 2 among them."""
    config, shape, mamba = sketch.config, sketch.shape, _summed(sketch)
    return {
        "linear attention was compared in dense models that are trained whole, without 1f1b": _unlike(sketch),
        "linear attention with decays by channel needed 5% less to 4% more (9 programs, none with remat=dots)": (
            _by_channel(sketch)
        ),
        "Mamba 2 over context alone in rows of more than 4,096 tokens needed 5% less (1 compiled program)": (
            bool(mamba) and sketch.mesh.context > 1 and sketch.mesh.tensor == 1 and config.train.seq_len > 4096
        ),
        "Mamba 2 beside experts that see the tokens of all devices needed 11% less to 3% more (2 compiled programs)": (
            bool(mamba) and sketch.mesh.tensor == 1 and "gather" in exchanges(sketch)
        ),
        "Mamba 2 beside experts over several hosts needed 32% more (1 compiled program)": (
            bool(mamba) and bool(exchanges(sketch)) and sketch.num_gpus > sketch.gpus_per_host
        ),
        "Mamba 2 with remat=none needed 6% less to 3% more (3 compiled programs)": (
            bool(mamba) and config.remat == "none"
        ),
        "Mamba 2 that XLA computes, not kernels, was not compared": not all(rule.kernels for rule in mamba),
        "the gated delta rule by kernels over context > 2 needed 13% less (1 compiled program)": (
            sketch.mesh.context > 2 and shape.remembers and not mamba and not _by_channel(sketch)
        ),
        "linear attention over several hosts needed 9% less (1 compiled program)": (
            shape.remembers and sketch.num_gpus > sketch.gpus_per_host
        ),
        "linear attention with remat=none in two repeats of a pattern needed 6% less (1 compiled program)": (
            shape.remembers and config.remat == "none" and max(one.repeats for one in shape.segments) < 3
        ),
    }


def _without_loop(sketch: Sketch) -> bool:
    """Whether layers are in no loop in a run of a kind that recorded programs are of."""
    config, shape = sketch.config, sketch.shape
    dense = not exchanges(sketch) and not _latent(sketch) and not shape.remembers and shape.num_layers <= 16
    alone = sketch.passes == sketch.mesh.pipeline == 1 and sketch.num_gpus <= sketch.gpus_per_host
    return dense and alone and (config.unroll, config.remat, config.lora.rank) == (0, "dots", 0)


def _unlike_adapted(sketch: Sketch) -> bool:
    """Whether adapters are beside rows that are sent or latents in a run of a kind that no recorded program is of."""
    config, mesh = sketch.config, sketch.mesh
    moved = "all_to_all" in exchanges(sketch) or sketch.execution.gathers_tokens
    there = config.lora.rank > 0 and (moved or _latent(sketch))
    alike = config.remat == "full" and mesh.fsdp > 1 and mesh.context == mesh.tensor == mesh.pipeline == 1
    return there and not (alike and sketch.passes == 1 and sketch.num_gpus <= sketch.gpus_per_host)


def _between(sketch: Sketch) -> bool:
    """Whether a run with adapters has fewer tokens than are known to need less, and more than are known to need all."""
    mesh = sketch.mesh
    apart = mesh.data > 1 and mesh.fsdp == mesh.context == mesh.tensor == 1
    return sketch.config.lora.rank > 0 and apart and ALL < sketch.tokens < WAITING


def _unlike(sketch: Sketch) -> bool:
    """Whether linear attention is in a run of a kind that no recorded program is of."""
    lightning = any(isinstance(block.attention, LightningConfig) for block in sketch.shape.kinds)
    compared = _by_channel(sketch) or any(_summed(sketch)) or lightning
    experts = any(block.mlp.num_experts for block in sketch.shape.kinds) and not compared
    both_ways = sketch.mesh.pipeline > 1 and sketch.schedule.both_ways
    return sketch.shape.remembers and (experts or sketch.config.lora.rank > 0 or both_ways)


def _convolves(sketch: Sketch) -> bool:
    return any(isinstance(mixer, ShortConvConfig) for block in sketch.shape.kinds for mixer in block.mixers)


def _other_than(sketch: Sketch, *axes: str) -> bool:
    """Whether a run is of another kind than over fsdp and these axes, with remat=full and one microbatch, without
    adapters."""
    config, used = sketch.config, {axis for axis, size in sketch.mesh.sizes().items() if size > 1}
    plain = config.remat == "full" and sketch.passes == 1 and not config.lora.rank
    return not plain or bool(used - {"fsdp", *axes})


def _summed(sketch: Sketch) -> list[Rule]:
    """Of the layers of Mamba 2."""
    found = (mixer for block in sketch.shape.kinds for mixer in block.mixers if isinstance(mixer, MambaConfig))
    return [Rule.of(mixer, sketch) for mixer in found]


def _by_channel(sketch: Sketch) -> bool:
    return any(getattr(block.attention, "by_channel", False) for block in sketch.shape.kinds)


def _latent(sketch: Sketch) -> bool:
    return any(isinstance(block.attention, MlaConfig) for block in sketch.shape.kinds)
