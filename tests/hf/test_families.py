"""Each family against transformers: logits, gradients, the checkpoint written back, and greedy tokens where no server
says them. The references are tiny random checkpoints that transformers itself saved, with what it computed
(make_references.py)."""

import json
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from served_families import LEFT_OUT
from small import logits_of, mesh_of

from shardlm import hf_files, weights
from shardlm.generate import Sampling, generate
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.rules import Rules
from shardlm.state import ModelDef, at_rest

REFERENCES = pathlib.Path(__file__).parent / "references"
NAMES = sorted(path.name for path in REFERENCES.iterdir())
# Made of what others have: the wide tests alone take their logits, gradients and greedy tokens (2 s of a core each,
# nothing cached), and gradients and greedy tokens of the costly ones (5 to 20 s).
ALIKE = "arcee dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma glm glm4_moe glm4_moe_lite granite_swa"
ALIKE += " granitemoe granitemoe_swa granitemoeshared helium hunyuan_moe hy_v3 internlm3 llama_dynamic minimax_m2 olmo3"
ALIKE += " hyperclovax jais2 cwm iquestcoder lfm3 mellum ministral sarvam_mla sarvam_moe vaultgemma"
ALIKE += " opt galactica phi phimoe cohere stablelm stablelm_parallel falcon falcon_new gpt_bigcode minicpm3 dbrx gptj"
ALIKE += " gpt_neo persimmon bloom mpt falcon_rw"
ALIKE += " flint kolibri1 muse_glimmer"
ALIKE += " gemma4_moe afmoe mistral4 olmo_hybrid mimo_v2_flash laguna cohere2_moe deepseek qwen3_5 step3p5 llama_biases"
ALIKE = (ALIKE + " olmoe qwen2_moe seed_oss solar_open starcoder2 youtu").split()
COSTLY = [
    "bailing_hybrid",
    "deepseek_v32",
    "deepseek_v4",
    "gemma3n",
    "glm_moe_dsa",
    "hy_v4",
    "kimi_linear",
    "mistral_large4",
]
COSTLY += ["glm5_next", "lara_mini", "longcat_flash", "minimax", "minimax_m3"]
COSTLY += ["qwen3_5_moe", "qwen4_exp"]
COSTLY += ["bamba", "falcon_h1_norm", "lfm2_moe", "granitemoehybrid_moe", "nemotron_h_moe"]
# The greedy tokens of these are asked of shardlm.generate, which takes 40% of a test (two programs more): of the rest
# serve/test_families_served.py has them. Windows and sinks are here too; memories are in test_one_forward.py.
GENERATED = {*LEFT_OUT, "llama", "gemma3", "gpt_oss"}
# float32 sums in another order (measured: up to 2e-5, Gemma 3's).
LOGITS, GRADIENTS = 1e-4, 1e-3
OF_MEMORIES = 3e-4  # a norm makes much of what is read where little is remembered (most tokens 2e-6, one 9e-5)
# Norms of inputs of 8 numbers do too: transformers' own float32 is up to 8e-5 from its float64.
OF_INPUTS = 3e-4


class Reference:
    """A family's checkpoint opened on a mesh, and what transformers computes with it."""

    def __init__(self, name: str, spec: MeshSpec, home: pathlib.Path = REFERENCES):
        self.name, self.folder = name, hf_files.Folder.open(home / name)
        self.facts = json.loads((home / name / "expected.json").read_text())
        stored = hf_files.header(home / name / "expected.safetensors.reference")
        self.tokens, self.logits, self.greedy = (stored[key].read(...) for key in ("tokens", "logits", "greedy"))
        config = Pretrained(str(home / name), length=self.tokens.shape[1]).transformer()
        self.mesh = mesh_of(spec)
        with jax.set_mesh(self.mesh):
            self.model = ModelDef.make(config, Execution(Rules.make("zero3", spec).for_decoding()))
            shapes = jax.tree.map(partial(at_rest, mesh=self.mesh), self.model.shapes)
            self.params = weights.load(self.model, self.folder, shapes)

    def names(self, block):
        return registry.names(self.folder.config, self.model.config, block)


def close(reference: Reference) -> float:
    """How far logits may be from those of transformers."""
    config = reference.model.config
    return OF_MEMORIES if config.memories else OF_INPUTS if config.inputs else LOGITS


def scored(reference: Reference) -> np.ndarray:
    """Logits of its tokens."""
    with jax.set_mesh(reference.mesh):
        run = jax.jit(partial(logits_of, reference.model))
        return np.asarray(run(reference.params, jnp.asarray(reference.tokens)))


def loss(model, tokens, params):
    logits = logits_of(model, params, tokens)
    hit = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1])
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits[:, :-1]) * hit, axis=-1)), logits


@pytest.mark.parametrize("name", ALIKE)
def test_files_of_a_family(name, tmp_path):
    written_back(Reference(name, MeshSpec()), tmp_path / "back")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", COSTLY)
def test_logits_of_a_family_and_its_files(name, tmp_path):
    reference = Reference(name, MeshSpec())
    assert np.abs(scored(reference) - reference.logits).max() < close(reference)
    written_back(reference, tmp_path / "back")


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] * (name in ALIKE + COSTLY)) for name in NAMES]
)
def test_a_family_computes_what_transformers_computes(name, tmp_path):
    reference = Reference(name, MeshSpec())
    check(reference, tmp_path / "back", generates=name in GENERATED)


def check(reference: Reference, back: pathlib.Path, generates: bool = True) -> None:
    """Logits, the loss and its gradients, the checkpoint written to `back`, and greedy tokens."""
    model, params, tokens = reference.model, reference.params, jnp.asarray(reference.tokens)
    with jax.set_mesh(reference.mesh):
        (value, logits), gradient = jax.jit(jax.value_and_grad(partial(loss, model, tokens), has_aux=True))(params)
        if generates and reference.name != "llama_dynamic":  # its rotation changes with every token that is appended
            prompt = reference.tokens[0].tolist()
            greedy = list(generate(model, params, prompt, max_new_tokens=32, sampling=Sampling(temperature=0)))
            assert greedy == reference.greedy.tolist()
    assert np.abs(logits - reference.logits).max() < close(reference)
    assert float(value) == pytest.approx(reference.facts["loss"], abs=1e-5)
    found = {t.name: t.make() for t in weights.planned(model.config, gradient, reference.names, np.dtype("float32"))}
    for path, (norm, product) in reference.facts["gradients"].items():
        a = found[path].astype(np.float64).ravel()
        assert np.linalg.norm(a) == pytest.approx(norm, rel=GRADIENTS, abs=1e-7), path
        assert a @ np.cos(np.arange(a.size)) == pytest.approx(product, rel=GRADIENTS, abs=GRADIENTS * norm + 1e-7), path
    written_back(reference, back)


def written_back(reference: Reference, path: pathlib.Path) -> None:
    """Bit for bit what it was read from."""
    dtype = np.dtype(ml_dtypes.bfloat16)
    tensors = weights.planned(reference.model.config, reference.params, reference.names, dtype)
    hf_files.write_folder(path, tensors, reference.folder.config)
    back = hf_files.Folder.open(path)
    assert back.config == reference.folder.config and set(back.tensors) == set(reference.folder.tensors)
    for name, stored in reference.folder.tensors.items():
        assert np.array_equal(stored.read(...).view(np.uint16), back.tensors[name].read(...).view(np.uint16)), name


MESHED = ["llama_tied", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4", "olmo2", "phi3", "glm4"]
MESHED += ["nemotron_h", "gemma3", "gemma3n", "gemma4", "gemma4_moe"]
MESHED += ["bailing_hybrid", "deepseek_v32", "deepseek_v4", "hy_v4", "mistral_large4", "qwen4_exp"]
MESHED += ["glm5_next", "kolibri1", "lara_mini", "longcat_flash", "minimax", "minimax_m3", "muse_glimmer"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] * (name in COSTLY + ALIKE)) for name in MESHED]
)
def test_a_family_on_a_mesh(name):
    reference = Reference(name, MeshSpec(fsdp=2, expert=2, tensor=2))
    assert np.abs(scored(reference) - reference.logits).max() < close(reference)
