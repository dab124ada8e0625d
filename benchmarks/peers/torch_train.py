"""The PyTorch side of the training comparison: a Llama step at PyTorch's fastest, on the CPU in float32, or with
--device=cuda --dtype=bfloat16 on a GPU under autocast, weights and optimizer in float32 as shardlm has them.

Owns the model, the step and its timing, and prints one JSON line. Our side is `python -m launch.bench train`;
the commands are in README.md of this folder. Needs only torch and imports nothing of shardlm.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import time

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and the batch it is trained on; sizes are in elements, `batch` x `seq` tokens a step."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    batch: int
    seq: int


SHAPES = {
    "768x12": Shape(768, 12, 12, 4, 2048, 8192, tied=False, batch=4, seq=256),
    "288x6": Shape(288, 6, 6, 6, 768, 8192, tied=True, batch=8, seq=256),
}
MODES = ("eager", "compile", "compile-autotune")


def rotate(x, cos, sin):
    """Rotary embedding of x [B, K, T, H] by the half-split convention; cos, sin are [T, H / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention with one fused projection for q, k and v."""

    def __init__(self, s):
        super().__init__()
        self.head_dim = s.hidden // s.heads
        self.sizes = [s.heads * self.head_dim, s.kv_heads * self.head_dim, s.kv_heads * self.head_dim]
        self.qkv = nn.Linear(s.hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(s.hidden, s.hidden, bias=False)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        q, k, v = (p.view(b, t, -1, self.head_dim).transpose(1, 2) for p in self.qkv(x).split(self.sizes, -1))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """Pre-norm attention and SwiGLU; gate and up are one matrix."""

    def __init__(self, s):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(s.hidden, eps=1e-5), nn.RMSNorm(s.hidden, eps=1e-5)
        self.attention = Attention(s)
        self.gate_up = nn.Linear(s.hidden, 2 * s.ffn, bias=False)
        self.down = nn.Linear(s.ffn, s.hidden, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Tokens and targets [B, T] -> mean cross-entropy in nats."""

    def __init__(self, s):
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.hidden)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, eps=1e-5)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        if s.tied:
            self.head.weight = self.embed.weight
        half = s.hidden // s.heads // 2
        angles = torch.outer(torch.arange(s.seq), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_step(shape, mode="compile", seed=0, device="cpu", dtype=torch.float32):
    """A function of no arguments that trains one step on a fixed random batch and returns the loss.

    The step: forward, mean cross-entropy, backward, clip to global norm 1.0, fused AdamW.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = Llama(shape)
        tokens = torch.randint(shape.vocab, (shape.batch, shape.seq + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if mode == "eager":
        forward = model
    else:
        forward = torch.compile(model, mode="max-autotune" if mode == "compile-autotune" else None)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = forward(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return loss.item()

    return step


def measure(step, steps, seconds, warmup):
    """Call `step` `warmup` times, then time it up to `steps` times or `seconds` -> losses, step seconds."""
    losses = [step() for _ in range(warmup)]
    times, began = [], time.perf_counter()
    while len(times) < steps and (not times or time.perf_counter() - began < seconds):
        start = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - start)
    return losses, times


def percentile(values, q):
    """Nearest-rank percentile, q in 0..100."""
    ordered = sorted(values)
    return ordered[round(q / 100 * (len(ordered) - 1))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="768x12")
    parser.add_argument("--shape_json", help="the fields of Shape as JSON, instead of --shape")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="that is multiplied in")
    parser.add_argument("--vocab", type=int, help="replaces the shape's vocabulary")
    parser.add_argument("--mode", choices=MODES, default="compile")
    parser.add_argument("--steps", type=int, default=20, help="most timed steps")
    parser.add_argument("--seconds", type=float, default=60, help="start no timed step after this long")
    parser.add_argument("--warmup", type=int, default=3, help="steps not timed; the first compiles")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = Shape(**json.loads(args.shape_json)) if args.shape_json else SHAPES[args.shape]
    dtype = getattr(torch, args.dtype)
    if args.vocab:
        shape = dataclasses.replace(shape, vocab=args.vocab)
    quiet = contextlib.redirect_stdout(None) if args.mode == "compile-autotune" else contextlib.nullcontext()
    with quiet:
        step = make_step(shape, args.mode, device=args.device, dtype=dtype)
        losses, times = measure(step, args.steps, args.seconds, max(args.warmup, 1))
    tokens = shape.batch * shape.seq
    report = {
        "peer": "torch",
        "mode": args.mode,
        "shape": dataclasses.asdict(shape),
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "peak_memory_bytes": {"measured_on_device": torch.cuda.max_memory_allocated()} if args.device == "cuda" else {},
        "threads": torch.get_num_threads(),
        "steps": len(times),
        "tokens_per_second": {f"p{q}": round(tokens / percentile(times, 100 - q), 1) for q in (10, 50, 90)},
        "step_seconds": {f"p{q}": round(percentile(times, q), 4) for q in (10, 50, 90)},
        "loss": {"first": round(losses[0], 4), "last": round(losses[-1], 4)},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "cpus": os.cpu_count(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
