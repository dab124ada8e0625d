"""An adapter whose files do not fit the model that is served is refused from what they say of themselves: before
weights are read, and so before anything is compiled."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, TOKENIZER, decoding_from, folder_of
from oracle import Oracle
from small_moe import DEEPSEEK, MOE
from test_adapters_served import PROMPT, SIZES, adapter_of

from shardlm import hf_files, peft_folder
from shardlm.checkpoint import CheckpointConfig, Checkpoints
from shardlm.config_json import to_json
from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.mtp import MtpConfig
from shardlm.models.pretrained import Pretrained
from shardlm.opened import describe, load
from shardlm.run_files import CHECKPOINTS, save_run_files
from shardlm.serve import build
from shardlm.serve.adapter_table import LoRARequest, Room
from shardlm.serve.adapters import check, fitting
from shardlm.serve.layers import apart
from shardlm.serve.llm import LLM
from shardlm.serve.sampling_params import SamplingParams
from shardlm.train.config import RunConfig, TrainConfig

LORA = LoraConfig(2, 4.0, ("wq", "wo"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("fitting")
    base = folder_of(home / "base")
    narrow = folder_of(home / "narrow", 0, dataclasses.replace(CONFIG, embed_dim=CONFIG.embed_dim // 2))
    experts = folder_of(home / "experts", 0, dataclasses.replace(MOE, vocab_size=CONFIG.vocab_size))
    return {
        "base": base,
        "fits": adapter_of(home / "fits", base, LORA, 0),
        "narrow": adapter_of(home / "narrow_one", narrow, LORA, 0),
        "experts": adapter_of(home / "of_experts", experts, LORA, 0),
    }


def changed(folder, path, config=None, tensors=lambda given: given):
    """A copy of a folder of PEFT with other options, and with other tensors, {name: array} -> {name: array}."""
    shutil.copytree(folder, path)
    described = json.loads((path / peft_folder.CONFIG).read_text()) | (config or {})
    described = {name: value for name, value in described.items() if value != "gone"}
    (path / peft_folder.CONFIG).write_text(json.dumps(described))
    given = {name: stored.read(...) for name, stored in hf_files.header(folder / peft_folder.WEIGHTS).items()}
    planned = [hf_files.Planned(n, a.dtype, a.shape, lambda a=a: a) for n, a in tensors(given).items()]
    list(hf_files.write_file(path / peft_folder.WEIGHTS, planned))
    return path


def without(*ends):
    return lambda given: {name: a for name, a in given.items() if not name.endswith(ends)}


def renamed(old: str, new: str):
    return lambda given: {name.replace(old, new): a for name, a in given.items()}


def wider(given):
    return {name: np.repeat(a, 2, axis=0 if "lora_A" in name else 1) for name, a in given.items()}


ELSEWHERE = {"base_model_name_or_path": "someone/else"}  # a name on the hub, which nobody asks
WRONG = {
    "other sizes": (
        "narrow",
        {},
        r"for another model than what is served: embed_dim is 16, served is 32. It stands on .*; serve",
    ),
    "other layers": (
        "experts",
        {},
        r"for another model than what is served: .*mlp is a MoeConfig, served is a MlpConfig; ",
    ),
    "other sizes of a base elsewhere": (
        "narrow",
        {"config": ELSEWHERE},
        r"lora_B.weight is \[16, 2\] and the model needs \[32, 2\]",
    ),
    "a larger rank": ("fits", {"config": {"r": 32}}, "has rank 32 and max_lora_rank=4; start with max_lora_rank=32"),
    "a rank that is not said": ("fits", {"tensors": wider}, r"has rank 4 and adapter_config.json says 2; save the"),
    "a rank that is more": ("fits", {"config": {"r": 4}}, r"has rank 2 and adapter_config.json says 4; save the"),
    "no expression": ("fits", {"config": {"rank_pattern": {"[": 2}}}, "has rank_pattern=.*; it is an object of"),
    "no rank": ("fits", {"config": {"r": "gone"}}, "has r=None; ranks are whole numbers, and both are above 0"),
    "no alpha": ("fits", {"config": {"lora_alpha": 0}}, "has lora_alpha=0; ranks are"),
    "a half": (
        "fits",
        {"tensors": without("0.self_attn.q_proj.lora_B.weight")},
        r"lacks .*0.self_attn.q_proj.lora_B.wei",
    ),
    "a layer less": (
        "fits",
        {"tensors": without("0.self_attn.q_proj.lora_A.weight", "0.self_attn.q_proj.lora_B.weight")},
        r"lacks .*layers.0.self_attn.q_proj.lora_A.weight, .*; save",
    ),
    "a module less": (
        "fits",
        {"config": {"target_modules": ["q_proj", "o_proj", "up_proj"]}},
        "has none of up_proj, target_modules of",
    ),
    "modules of another model": (
        "fits",
        {"config": {"target_modules": ["query_key_value"]}},
        r"adapts .*layers.0.self_attn.o_proj, .* and 2 more, which .*=\['query_key_value'\] does not name",
    ),
    "a module more": (
        "fits",
        {"config": {"target_modules": ["q_proj", "other"]}},
        r"adapts .*layers.2.self_attn.o_proj, which .* does not name, so that PEFT leaves it",
    ),
    "an expression for other modules": (
        "fits",
        {"config": {"target_modules": r".*\.q_proj"}},
        r"adapts model.layers.0.self_attn.o_proj, .*2.self_attn.o_proj, which .* does not name, so that PEFT",
    ),
    "other layers alone": (
        "fits",
        {"config": {"layers_to_transform": [0, 2]}},
        r"layers.1.self_attn.o_proj, .*=\[0, 2\]",
    ),
    "excluded modules": (
        "fits",
        {"config": {"exclude_modules": r".*\.1\..*q_proj"}},
        r"layers.1.self_attn.q_proj, whi",
    ),
    "a layer less than an expression names": (
        "fits",
        {
            "config": {"target_modules": r"model\.layers\.\d\.self_attn\.(q|o)_proj"},
            "tensors": without("0.self_attn.q_proj.lora_A.weight", "0.self_attn.q_proj.lora_B.weight"),
        },
        r"lacks .*layers.0.self_attn.q_proj.lora_A.weight, .*; save",
    ),
    "a wrong expression": ("fits", {"config": {"target_modules": "*q"}}, r"target_modules='\*q'; it is an expression"),
    "no layer": ("fits", {"config": {"layers_to_transform": "all"}}, "layers_to_transform='all'; it is layers' numb"),
    "a layer more": ("fits", {"tensors": renamed("layers.0", "layers.9")}, r"lacks|do not fit the model: .*layers.9"),
    "another module": (
        "fits",
        {"tensors": renamed("self_attn.q_proj", "mlp.gate")},
        "adapts mlp.gate, which has no adapter in shardlm; merge the",
    ),
    "experts": (
        "fits",
        {"tensors": renamed("self_attn.q_proj", "mlp.experts.3.up_proj")},
        "adapts mlp.experts.3.up_proj, projections of routed experts, .* here: merge the",
    ),
    "experts' arrays": (
        "fits",
        {"config": {"target_parameters": ["mlp.experts.gate_up_proj"]}},
        "target_parameters=.*routed experts, .*merge_and_unload",
    ),
    "another thing": ("fits", {"config": {"peft_type": "IA3"}}, "has peft_type='IA3'; supported: 'LORA'"),
}


@pytest.mark.parametrize("how", WRONG)
def test_it_is_refused_before_weights_are_read(how, folders, tmp_path, monkeypatch):
    name, changes, message = WRONG[how]
    folder = changed(folders[name], tmp_path / "adapter", **changes)
    monkeypatch.setattr(build, "load", None)
    with pytest.raises(ShardlmError, match=message):
        LLM(folders["base"], lora_modules={"one": folder}, max_lora_rank=4, **SIZES)


def test_a_run_without_its_checkpoint_is_refused_before_weights_are_read(folders, tmp_path, monkeypatch):
    model = Pretrained(str(folders["base"])).pinned()
    config = RunConfig(model, lora=LORA, train=TrainConfig(steps=1, global_batch=1, seq_len=64))
    save_run_files(tmp_path, to_json(config), TOKENIZER.to_json().encode())
    monkeypatch.setattr(build, "load", None)
    for saved, message in ((False, "no save was completed there"), (True, "wo_lora_a is not in the checkpoint")):
        with Checkpoints(tmp_path / CHECKPOINTS, CheckpointConfig()) as writer:
            if saved:
                writer.save(1, {"params": {"segments": jnp.zeros(2)}}, {}, {})
        with pytest.raises(ShardlmError, match=message):
            LLM(folders["base"], lora_modules={"one": tmp_path}, **SIZES)


def test_a_model_that_is_an_adapter_has_no_room_for_others(folders, monkeypatch):
    monkeypatch.setattr(build, "load", None)
    with pytest.raises(ShardlmError, match="serve the checkpoint, and give this one as one of lora_modules"):
        LLM(folders["fits"], enable_lora=True, **SIZES)


def test_its_base_may_be_elsewhere(folders, tmp_path):
    folder = changed(folders["fits"], tmp_path / "adapter", ELSEWHERE)
    base, room = Pretrained(str(folders["base"])).pinned(), Room(1, 4)
    check(folder, base, 64, room)
    drafting = dataclasses.replace(apart(base.transformer()), mtp=MtpConfig(next(base.transformer().blocks())))
    fitting(folder, drafting, base, 64, room)  # the modules that draft have no adapter of their own
    with pytest.raises(ShardlmError, match="someone/else"):
        describe(folder)


@pytest.mark.wide
def test_dense_layers_and_shared_experts_of_a_model_with_experts_have_room(tmp_path):
    """As training adapts them (lora.targets)."""
    base = folder_of(tmp_path / "base", 0, dataclasses.replace(DEEPSEEK, vocab_size=CONFIG.vocab_size))
    rng, wide, narrow = np.random.default_rng(0), DEEPSEEK.expert_dim, DEEPSEEK.embed_dim
    sizes = {
        "layers.0.mlp.down_proj": (DEEPSEEK.mlp_dim, narrow),
        "layers.1.mlp.shared_experts.up_proj": (narrow, wide),
    }
    shapes = {}
    for module, (inputs, outputs) in sizes.items():
        name = f"base_model.model.model.{module}"
        shapes |= {f"{name}.lora_A.weight": (2, inputs), f"{name}.lora_B.weight": (outputs, 2)}
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    config = {
        "base_model_name_or_path": str(base),
        "target_modules": "model.(layers.0.mlp.down|layers.1.+shared.+up)_proj",
    }
    attention = adapter_of(tmp_path / "attention", base, LoraConfig(2, 4.0, ("wo",)), 0)
    folder = changed(attention, tmp_path / "adapter", config, lambda given: made)
    with decoding_from(SIZES["max_num_seqs"]):
        llm = LLM(base, lora_modules={"one": folder}, **SIZES)
    prompt, params = TOKENIZER.encode(PROMPT), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = llm.generate([PROMPT] * 2, params, lora_request=[LoRARequest("one"), None])
    said = [Oracle(load(path, dtype="float32")).reply(prompt, params).tokens for path in (folder, base)]
    assert [list(one.outputs[0].token_ids) for one in found] == said and said[0] != said[1]
