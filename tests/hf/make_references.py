"""Writes tests/hf/references/NAME/: a tiny random checkpoint of each family, saved by transformers itself, and what
transformers computes with it: logits, greedy tokens, and the gradient of the loss (of each tensor its norm and its
product with a cosine). Needs torch and transformers:

    python tests/hf/make_references.py FOLDER [NAME ...]
"""

import copy
import json
import os
import pathlib
import re
import sys
import tempfile

import torch
import transformers
from classic_cases import CLASSIC, OTHER_SIZES
from newest_cases import NEWEST
from reference_cases import CASES, EXPERTS, GPT2
from reference_parts import SIZES
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

UNTRAINED = re.compile(
    r"e_score_correction_bias|layer_scalar|\.expert_bias|moe\.router_bias|ffn\.gate\.(bias|tid2eid)|act_fn\.(beta|eps)"
    r"|ple_embedding\.(layer_multipliers|ngram_heads_)"
)
FIXED = ("rotary", "pos_emb", "attn.bias", "mup_vector", "slope_rate", "_decay")  # buffers that options make
ROWS, LENGTH, NEW = 2, 24, 32
EVERY = CASES | NEWEST | CLASSIC
ALONE = {
    "glm5_next": "Glm5NextTextModel",
    "minimax_m3_vl": "MiniMaxM3VLForCausalLM",
    "mistral_large4": "MistralLarge4TextModel",
    "muse_glimmer": "MuseGlimmerTextModel",
    "step3p7": "Step3p5ForCausalLM",
}


def make(name: str, folder: pathlib.Path) -> None:
    model_type, options = EVERY[name]
    torch.manual_seed(sum(map(ord, name)) + int(os.environ.get("SHARDLM_REFERENCE_SEED", "0")))
    sizes = {"gpt2": GPT2, **{kind: {} for kind in OTHER_SIZES}}.get(model_type, SIZES)
    config = transformers.CONFIG_MAPPING[model_type](**{**sizes, **options})
    # Eagerly, transformers adds Falcon's linear biases twice.
    config._attn_implementation = "sdpa" if getattr(config, "alibi", False) else "eager"
    if model_type == "mistral4":  # which the Auto classes leave to what also sees
        model = transformers.Mistral4ForCausalLM(config)
    elif model_type in ALONE:  # of which transformers has no other
        model = transformers.AutoModelForImageTextToText.from_config(config)
        model.alone = True
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    if name == "deepseek":
        with_experts(model)
    model = model.float().eval()
    with torch.no_grad():  # as published models are, not as they start: norms and biases that differ from 1 and 0
        for path, weight in [*model.named_parameters(), *model.named_buffers()]:
            fixed = any(part in path for part in FIXED) and not path.endswith("rotary_emb.alpha")
            if weight.ndim and weight.is_floating_point() and not fixed:
                centre, spread = (weight, 0.2) if weight.ndim == 1 else (0.0, weight.shape[-1] ** -0.5)
                weight.copy_((centre + torch.randn_like(weight) * spread).bfloat16())
            if path.endswith("tid2eid"):  # experts of each token, not two times the same
                weight.copy_(torch.rand(len(weight), config.n_routed_experts).argsort()[:, : weight.shape[1]])
    saved(model, folder)
    tokens = torch.randint(3, config.get_text_config().vocab_size, (ROWS, LENGTH))
    logits = model(tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    row = tokens[:1]
    with torch.no_grad():
        for _ in range(NEW):
            best = model(row, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            row = torch.cat([row, best], dim=1)
    found = {"tokens": tokens.int(), "logits": logits.detach(), "greedy": row[0, LENGTH:].int().contiguous()}
    save_file(found, str(folder / "expected.safetensors.reference"))
    facts = {"transformers": transformers.__version__, "loss": loss.item(), "gradients": gradients(model)}
    (folder / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")


def with_experts(model) -> None:
    """Makes DeepSeek MoE of a Llama: after the first layer, MLPs are experts, which are V2's without groups."""
    options = {**SIZES, **EXPERTS, "topk_method": "greedy", "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    del options["model_type"], options["architectures"]
    config = transformers.CONFIG_MAPPING["deepseek_v2"](**options)
    for layer in model.model.layers[EXPERTS["first_k_dense_replace"] :]:
        layer.mlp = DeepseekV2Moe(config)
    model.published = EXPERTS


def saved(model, folder: pathlib.Path, dtype=torch.bfloat16) -> None:
    if hasattr(model, "published"):
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: a.detach().to(dtype).contiguous() for name, a in model.state_dict().items()}
        save_file(per_expert(tensors), str(folder / "model.safetensors"), metadata={"format": "pt"})
        config = {**model.config.to_dict(), **model.published, "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return
    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    if change := PUBLISHED.get(model.config.model_type):
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), str(file), metadata={"format": "pt"})
    if hasattr(model, "alone"):
        without_sight(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def published_kimi_linear(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Dense layers are `mlp`, where transformers writes them under the name of a mixture."""
    dense = re.compile(r"block_sparse_moe(\.\w+_proj\.weight)")
    return {dense.sub(r"mlp\1", name): a for name, a in tensors.items()}


def published_deepseek_v4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers undoes a part of its own renaming alone."""
    changes = (
        (r"^model\.", ""),
        (r"^embed_tokens", "embed"),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"attn\.norm", "attn.kv_norm"),
    )
    found = {}
    for name, a in tensors.items():
        for pattern, to in changes:
            name = re.sub(pattern, to, name)
        found[name] = a
    return found


def published_olmo_hybrid(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convolutions of queries, keys and values, where transformers writes thirds of all; and layers that attend to
    tokens have the names of their norms, where it writes one as layers of linear attention have it."""
    found = {}
    for name, a in tensors.items():
        layer, conv, letter = (
            name.partition("linear_attn.")[0],
            "_conv1d.weight",
            name.partition(".linear_attn.")[2][:1],
        )
        if name.endswith(conv):
            each = [f"{layer}linear_attn.{one}" for one in "qkv"]
            whole = torch.cat([tensors[f"{one}{conv}"] for one in each])
            parts = whole.split([len(tensors[f"{one}_proj.weight"]) for one in each])
            a = parts["qkv".index(letter)].contiguous()
        elif name.endswith(".feedforward_layer_norm.weight"):
            layer = name.removesuffix("feedforward_layer_norm.weight")
            if f"{layer}self_attn.q_proj.weight" in tensors:
                name = f"{layer}post_attention_layernorm.weight"
        found[name] = a
    return found


def without_sight(folder: pathlib.Path) -> None:
    """The language model alone: Step 3.7 as Step 3.5 is published, and those of ALONE."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    sight = ("vi", "patch_merge", "pre_mm_projector_norm", "model.vis", "multi_modal_projector")
    tensors = {name: a for name, a in load_file(file).items() if not name.startswith(sight)}
    tensors = {re.sub(r"^language_model\.", "", name): a for name, a in tensors.items()}
    tensors = {name.replace("model.language_model.", "model."): a for name, a in tensors.items()}
    save_file(tensors, str(file), metadata={"format": "pt"})
    alone = {"architectures": [ALONE[config["model_type"]]], **config["text_config"]}
    (folder / "config.json").write_text(json.dumps(alone, indent=2) + "\n")


def published_hy_v4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Networks' gates are `gate_proj`, where transformers gives them the name of attention's."""
    return {re.sub(r"(\.mlp\..*)linear_gate", r"\1gate_proj", name): a for name, a in tensors.items()}


def published_longcat_flash(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what transformers has for experts that give back what they read."""
    experts = {name.split(".down_proj")[0] for name in tensors if ".experts." in name and "down_proj" in name}
    return {
        name: a
        for name, a in tensors.items()
        if ".experts." not in name or re.sub(r"\.(gate|up|down)_proj.*", "", name) in experts
    }


def published_minimax(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without buffers, which options make and bfloat16 rounds."""
    return {name: a for name, a in tensors.items() if not name.endswith(("slope_rate", "_decay"))}


# What transformers writes otherwise than checkpoints of these are published, and reads as published.
PUBLISHED = {
    "longcat_flash": published_longcat_flash,
    "minimax": published_minimax,
    "deepseek_v4": published_deepseek_v4,
    "hy_v4": published_hy_v4,
    "kimi_linear": published_kimi_linear,
    "olmo_hybrid": published_olmo_hybrid,
}


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor for each expert, where transformers holds those of all in one."""
    found = {}
    for name, a in tensors.items():
        where, _, kind = name.partition(".mlp.experts.")
        for i in range(len(a)) if kind else ():
            parts = {"down_proj": a[i]}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), a[i].chunk(2), strict=True))
            found |= {f"{where}.mlp.experts.{i}.{part}.weight": w.contiguous() for part, w in parts.items()}
        if not kind:
            found[name] = a
    return found


def gradients(model) -> dict[str, list[float]]:
    """Of each tensor as the checkpoint has it: norm, and product with a cosine."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    with tempfile.TemporaryDirectory() as folder:
        saved(model, pathlib.Path(folder), torch.float32)
        tensors = load_file(f"{folder}/model.safetensors")
    trained = {path: a.double().flatten() for path, a in tensors.items() if not UNTRAINED.search(path)}
    wave = {path: torch.cos(torch.arange(a.numel(), dtype=torch.float64)) for path, a in trained.items()}
    return {path: [a.norm().item(), (a @ wave[path]).item()] for path, a in trained.items()}


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1])
    for name in sys.argv[2:] or EVERY:
        make(name, out / name)
        print(name)
