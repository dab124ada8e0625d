"""As make_mtp_reference.py, of Qwen3-Next and Qwen 3.5 MoE, whose checkpoints have one module beside the decoder
(`mtp.*`), put together as vLLM does (vllm/model_executor/models/qwen3_next_mtp.py): the embedding first, a layer that
attends to tokens, and a norm. Of Qwen 3.5 experts are in one tensor, as it is published:

    python tests/hf/make_hybrid_mtp_reference.py FOLDER
"""

import copy
import json
import os
import pathlib
import sys

import torch
import transformers
from make_mtp_reference import WEIGHT, slope, summary
from make_references import LENGTH, ROWS, UNTRAINED, per_expert
from reference_cases import CASES
from reference_parts import SIZES
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe
from transformers.models.qwen3_next import modeling_qwen3_next as following

KINDS = {
    "qwen3_next": (following.Qwen3NextDecoderLayer, following.Qwen3NextRMSNorm, "Qwen3NextForCausalLM"),
    "qwen3_5_moe": (moe.Qwen3_5MoeDecoderLayer, moe.Qwen3_5MoeRMSNorm, "Qwen3_5MoeForCausalLM"),
}


class Module(torch.nn.Module):
    """The module, in the names of published checkpoints behind `mtp.`."""

    def __init__(self, config, layer, norm):
        super().__init__()
        D, own = config.hidden_size, copy.deepcopy(config)
        own.layer_types = ["full_attention"] * config.num_hidden_layers
        self.fc = torch.nn.Linear(2 * D, D, bias=False)
        self.layers = torch.nn.ModuleList([layer(own, 0)])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(D, eps=config.rms_norm_eps) for _ in range(3)
        )

    def forward(self, hidden, embedded, rotation):
        x = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        length = x.shape[1]
        mask = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)[None, None]
        return self.norm(self.layers[0](self.fc(x), position_embeddings=rotation, attention_mask=mask))


def make(name: str, folder: pathlib.Path) -> None:
    torch.manual_seed(12 + int(os.environ.get("SHARDLM_REFERENCE_SEED", "0")))
    layer, norm, architecture = KINDS[name]
    model_type, options = CASES[name]
    config = transformers.CONFIG_MAPPING[model_type](**SIZES | options)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    module = Module(config, layer, norm).float().eval()

    def published(tensors=lambda weight: weight.detach()) -> dict[str, torch.Tensor]:
        own = {f"mtp.{name}": a for name, a in module.named_parameters()}
        return {name: tensors(a) for name, a in (dict(model.named_parameters()) | own).items()}

    with torch.no_grad():  # as in make_references.py
        for weight in published(lambda a: a).values():
            centre, spread = (weight, 0.2) if weight.ndim == 1 else (0.0, weight.shape[-1] ** -0.5)
            weight.copy_((centre + torch.randn_like(weight) * spread).bfloat16())
    tokens = torch.randint(3, config.vocab_size, (ROWS, LENGTH))
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    rotation = model.model.rotary_emb(hidden, torch.arange(LENGTH - 1)[None])
    further = module(hidden[:, :-1], model.model.embed_tokens(tokens[:, 1:]), rotation)
    logits, counted = [model.lm_head(hidden), model.lm_head(further)], ROWS * (LENGTH - 1)
    losses = [
        cross_entropy(a[:, :-1].flatten(0, 1), tokens[:, 1 + depth :].flatten(), reduction="sum") / counted
        for depth, a in enumerate(logits)
    ]
    (losses[0] + WEIGHT * losses[1]).backward()
    weights = published() if name == "qwen3_5_moe" else per_expert(published())
    folder.mkdir(parents=True, exist_ok=True)
    weights = {path: a.bfloat16().contiguous() for path, a in weights.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config.dtype, config.architectures = torch.bfloat16, [architecture]
    if name == "qwen3_5_moe":
        config.mtp_num_hidden_layers = 1
    config.save_pretrained(folder)
    found = {"tokens": tokens.int()} | {f"logits_{depth}": a.detach() for depth, a in enumerate(logits)}
    save_file(found, str(folder / "expected.safetensors.reference"))
    gradients = {path: summary(a) for path, a in per_expert(published(slope)).items() if not UNTRAINED.search(path)}
    facts = {"losses": [loss.item() for loss in losses], "weight": WEIGHT, "gradients": gradients}
    (folder / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    for kind in KINDS:
        make(kind, pathlib.Path(sys.argv[1]) / kind)
