"""Writes a tiny random Llama, two heads of EAGLE-3 for it as they are published, and what torch computes with them. The
heads are written here after SpecForge's and vllm-project/speculators' own code: one as SpecForge saves it, whose
embedding is the model's, and one as speculators does, with all that differs there. Needs torch and transformers:

    python tests/hf/make_eagle_reference.py FOLDER
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.models.llama import modeling_llama as llama

ROWS, LENGTH, STEPS, KNOWN, PROPOSED, WIDTH = 2, 14, 4, 90, 40, 16
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
TARGET = {**SIZES, "vocab_size": KNOWN, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 8}
TARGET |= {"max_position_embeddings": 64, "rope_theta": 10_000.0, "tie_word_embeddings": False}
HEAD = {**SIZES, "vocab_size": KNOWN, "max_position_embeddings": 64, "rope_theta": 500.0}
PLAIN = {**HEAD, "hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 1, "model_type": "llama"}
OTHER = {**HEAD, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "model_type": "qwen3"}
LAYERS = {"specforge": (2, 4, 5), "speculators": (1, 3, 8)}  # behind which streams are read


class Layer(nn.Module):
    """The first one reads [embedding, stream]; `normed`: what it adds to is the stream after its norm."""

    def __init__(self, config: dict, first: bool, normed: bool):
        super().__init__()
        D, F, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        self.heads, self.kv_heads, self.dim = (
            config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.first, self.normed, R = first, normed, 2 * D if first else D
        norm = lambda width: llama.LlamaRMSNorm(width, eps)  # noqa: E731
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(R, self.heads * self.dim, bias=False),
                "k_proj": nn.Linear(R, self.kv_heads * self.dim, bias=False),
                "v_proj": nn.Linear(R, self.kv_heads * self.dim, bias=False),
                "o_proj": nn.Linear(self.heads * self.dim, D, bias=False),
            }
        )
        if config["model_type"] == "qwen3":
            self.self_attn.update({"q_norm": norm(self.dim), "k_norm": norm(self.dim)})
        self.mlp = nn.ModuleDict({n: nn.Linear(D, F, bias=False) for n in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(F, D, bias=False)
        self.input_layernorm, self.post_attention_layernorm = norm(D), norm(D)
        if first:
            self.hidden_norm = norm(D)

    def forward(self, embedded, hidden, rotation):
        residual = hidden
        if self.first:
            hidden = self.hidden_norm(hidden)
            residual = hidden if self.normed else residual
            x = torch.cat([self.input_layernorm(embedded), hidden], dim=-1)
        else:
            x = self.input_layernorm(hidden)
        hidden = residual + self.attend(x, rotation)
        x = self.post_attention_layernorm(hidden)
        made = nn.functional.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        return hidden + self.mlp["down_proj"](made)

    def attend(self, x, rotation):
        B, T, _ = x.shape
        split = lambda name: self.self_attn[name](x).view(B, T, -1, self.dim).transpose(1, 2)  # noqa: E731
        q, k, v = (split(name) for name in ("q_proj", "k_proj", "v_proj"))
        if "q_norm" in self.self_attn:
            q, k = self.self_attn["q_norm"](q), self.self_attn["k_norm"](k)
        q, k = llama.apply_rotary_pos_emb(q, k, *rotation)
        k, v = (llama.repeat_kv(a, self.heads // self.kv_heads) for a in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.self_attn["o_proj"](out.transpose(1, 2).reshape(B, T, -1))


class Head(nn.Module):
    def __init__(self, config: dict, count: int, normed: bool, own: bool):
        super().__init__()
        D, eps = config["hidden_size"], config["rms_norm_eps"]
        self.config = transformers.LlamaConfig(**{n: v for n, v in config.items() if n != "model_type"})
        self.fc = nn.Linear(count * WIDTH, D, bias=False)
        self.layers = nn.ModuleList([Layer(config, not i, normed) for i in range(config["num_hidden_layers"])])
        self.norm, self.lm_head = llama.LlamaRMSNorm(D, eps), nn.Linear(D, PROPOSED, bias=False)
        if own:
            self.embed_tokens, self.input_norm = nn.Embedding(KNOWN, D), llama.LlamaRMSNorm(count * WIDTH, eps)
        tokens = torch.randperm(KNOWN)[:PROPOSED].sort().values
        self.register_buffer("d2t", tokens - torch.arange(PROPOSED))
        self.register_buffer("t2d", torch.zeros(KNOWN, dtype=torch.bool).index_fill(0, tokens, True))

    def drafted(self, streams, tokens, embed, normed: bool = False, apart: tuple = ()):
        """(logits [B, STEPS, PROPOSED], the likeliest tokens [B, STEPS]) after `tokens`, of whose last one there is no
        stream yet. Of EAGLE 3.1: `normed`, its own stream goes on after the last norm, and `apart`, norms of each
        stream."""
        if apart:
            streams = torch.cat([norm(a) for norm, a in zip(apart, streams.split(WIDTH, dim=-1), strict=True)], dim=-1)
        elif hasattr(self, "input_norm"):
            streams = self.input_norm(streams)
        hidden, read, found, drafts = self.fc(streams), tokens[:, 1:], [], []
        for _ in range(STEPS):  # at position p stand the stream of p and token p + 1
            x, positions = hidden, torch.arange(hidden.shape[1])[None]
            rotation = llama.LlamaRotaryEmbedding(self.config)(x, positions)
            for layer in self.layers:
                x = layer(embed(read), x, rotation)
            logits = self.lm_head(self.norm(x[:, -1]))
            place = logits.argmax(-1)
            found.append(logits)
            drafts.append(place + self.d2t[place])
            read = torch.cat([read, drafts[-1][:, None]], dim=1)
            hidden = torch.cat([hidden, self.norm(x[:, -1:]) if normed else x[:, -1:]], dim=1)
        return torch.stack(found, 1), torch.stack(drafts, 1)


def drawn(module: nn.Module, size: float) -> None:
    """As in make_references.py, numbers of bfloat16."""
    for weight in module.parameters():
        centre, spread = (1.0, 0.2) if weight.ndim == 1 else (0.0, size * weight.shape[-1] ** -0.5)
        weight.copy_((centre + torch.randn_like(weight) * spread).bfloat16())


def streams_of(model, tokens) -> list[torch.Tensor]:
    """What enters each layer, and what leaves the last."""
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    model.model.norm.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    model(tokens, use_cache=False)
    return found


@torch.no_grad()
def make(folder: pathlib.Path) -> None:
    torch.manual_seed(5)
    model = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**TARGET, attn_implementation="eager")).float().eval()
    )
    heads = {"specforge": Head(PLAIN, 3, False, False), "speculators": Head(OTHER, 3, True, True)}
    drawn(model, 1.0)
    for head in heads.values():
        drawn(head, 1.5)  # so that the likeliest tokens differ
    tokens = torch.randint(0, KNOWN, (ROWS, LENGTH))
    streams, stored = streams_of(model, tokens[:, :-1]), {"tokens": tokens.int()}
    for name, head in heads.items():
        read = torch.cat([streams[layer] for layer in LAYERS[name]], dim=-1)
        stored[f"{name}_streams"] = read
        for end, normed in (("", False), ("_normed", True)):
            embed = getattr(head, "embed_tokens", model.model.embed_tokens)
            logits, drafts = head.drafted(read, tokens, embed, normed)
            stored |= {f"{name}_logits{end}": logits, f"{name}_drafts{end}": drafts.int()}
        apart = [llama.LlamaRMSNorm(WIDTH, SIZES["rms_norm_eps"]) for _ in LAYERS[name]]
        for i, norm in enumerate(apart):  # each with its own scale, which the test knows
            norm.weight.copy_(torch.linspace(0.5 + i, 1.5, WIDTH))
        logits, drafts = head.drafted(read, tokens, embed, True, tuple(apart))
        stored |= {f"{name}_logits_apart": logits, f"{name}_drafts_apart": drafts.int()}
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        tensors = {n: a if n in ("d2t", "t2d") else a.bfloat16() for n, a in head.state_dict().items()}
        if name == "specforge":
            tensors = {n.replace("layers.0.", "midlayer."): a for n, a in tensors.items()}
        save_file(tensors, str(own / "model.safetensors"), metadata={"format": "pt"})
        (own / "config.json").write_text(json.dumps(CONFIGS[name], indent=1) + "\n")
    target = folder / "target"
    model.bfloat16().save_pretrained(target)
    (target / "generation_config.json").unlink(missing_ok=True)
    save_file({n: a.contiguous() for n, a in stored.items()}, str(folder / "expected.safetensors.reference"))


CONFIGS = {
    "specforge": {
        **PLAIN,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": PROPOSED,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": PROPOSED,
        "target_hidden_size": WIDTH,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS["speculators"]),
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
        "transformer_layer_config": {n: v for n, v in OTHER.items() if n != "hidden_act"},
        "dtype": "bfloat16",
    },
}


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
