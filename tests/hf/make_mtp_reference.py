"""Writes a tiny random checkpoint of DeepSeek V3 whose modules predict further tokens, as it is published, and what
torch computes with it. transformers leaves these modules out, so they are built here of its layers (equations 21 to 24
of https://arxiv.org/abs/2412.19437): logits of each module, the losses, and the gradient of the first loss plus WEIGHT
times the mean of the others. Needs torch and transformers:

    python tests/hf/make_mtp_reference.py FOLDER
"""

import json
import os
import pathlib
import sys

import torch
import transformers
from make_references import LENGTH, ROWS, per_expert
from reference_cases import CASES
from reference_parts import SIZES
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

DEPTH, WEIGHT = 2, 0.4
OWN = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": DEPTH}


class Module(torch.nn.Module):
    """One module, in the names of the published checkpoint."""

    def __init__(self, config, layer: int):
        super().__init__()
        norm = lambda: deepseek.DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # noqa: E731
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = deepseek.DeepseekV3DecoderLayer(config, layer)
        self.shared_head = torch.nn.ModuleDict({"norm": norm()})

    def forward(self, hidden, embedded, rotation):
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        length = x.shape[1]
        mask = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)[None, None]
        return self.block(x, attention_mask=mask, position_embeddings=rotation)


def forward(model, modules, tokens):
    """(logits of the model, logits of each module), of rows that are one text each; module k's are of all tokens but
    the last k."""
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    found, rotation = [model.lm_head(hidden)], model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    for depth, module in enumerate(modules, 1):
        length = LENGTH - depth
        embedded = model.model.embed_tokens(tokens[:, depth:])
        hidden = module(hidden[:, :length], embedded, tuple(a[:, :length] for a in rotation))
        found.append(model.lm_head(module.shared_head["norm"](hidden)))
    return found


def published(model, modules, config, tensors=lambda weight: weight.detach()) -> dict[str, torch.Tensor]:
    """All tensors under their published names, the copies of embedding and head not among them; `tensors` of a
    parameter."""
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: a for name, a in everything.items() if "rotary" not in name}
    for i, module in enumerate(modules):
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        layer = f"model.layers.{config.num_hidden_layers + i}."
        found |= {layer + name.removeprefix("block."): a for name, a in own.items()}
    return {name: tensors(a) for name, a in found.items()}


def make(folder: pathlib.Path) -> None:
    torch.manual_seed(11 + int(os.environ.get("SHARDLM_REFERENCE_SEED", "0")))
    options = {**SIZES, **CASES["deepseek_v3"][1], **OWN}
    config = transformers.CONFIG_MAPPING["deepseek_v3"](**options)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    modules = [Module(config, config.num_hidden_layers + i).eval() for i in range(DEPTH)]
    with torch.no_grad():  # as in make_references.py
        for weight in published(model, modules, config, lambda a: a).values():
            centre, spread = (weight, 0.2) if weight.ndim == 1 else (0.0, weight.shape[-1] ** -0.5)
            weight.copy_((centre + torch.randn_like(weight) * spread).bfloat16())
    tokens = torch.randint(3, config.vocab_size, (ROWS, LENGTH))
    logits = forward(model, modules, tokens)
    counted = ROWS * (LENGTH - 1)  # by the first loss; equation 24 divides all by the same
    sums = [
        cross_entropy(a[:, :-1].flatten(0, 1), tokens[:, 1 + depth :].flatten(), reduction="sum")
        for depth, a in enumerate(logits)
    ]
    losses = [a / counted for a in sums]
    (losses[0] + WEIGHT * sum(losses[1:]) / DEPTH).backward()
    weights = {name: a.bfloat16() for name, a in per_expert(published(model, modules, config)).items()}
    for i in range(DEPTH):
        layer = f"model.layers.{config.num_hidden_layers + i}."
        weights[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config.dtype, config.architectures = torch.bfloat16, ["DeepseekV3ForCausalLM"]
    config.save_pretrained(folder)
    found = {"tokens": tokens.int()} | {f"logits_{depth}": a.detach() for depth, a in enumerate(logits)}
    save_file(found, str(folder / "expected.safetensors.reference"))
    gradients = {name: summary(a) for name, a in per_expert(published(model, modules, config, slope)).items()}
    gradients = {name: pair for name, pair in gradients.items() if "e_score_correction_bias" not in name}
    facts = {"losses": [loss.item() for loss in losses], "weight": WEIGHT, "gradients": gradients}
    (folder / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")
    assert set(load_file(folder / "model.safetensors")) == set(weights)


def slope(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def summary(a: torch.Tensor) -> list[float]:
    """Norm, and product with a cosine."""
    flat = a.double().flatten()
    return [flat.norm().item(), (flat @ torch.cos(torch.arange(flat.numel(), dtype=torch.float64))).item()]


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
