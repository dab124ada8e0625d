"""Opening and converting as a user does: `shardlm.load`, `launch.convert`, fine-tuning a folder, and the refusals."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from small import mesh_of

import shardlm
from shardlm import hf_files, weights
from shardlm.errors import ShardlmError
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.rules import Rules
from shardlm.state import ModelDef, at_rest

REFERENCES = pathlib.Path(__file__).parent / "references"


@pytest.fixture
def llama(tmp_path):
    return shutil.copytree(REFERENCES / "llama", tmp_path / "llama")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_tensors(folder, **changes):
    """Writes the folder anew with tensors of other arrays; None leaves one out."""
    opened = hf_files.Folder.open(folder)
    arrays = {name: stored.read(...) for name, stored in opened.tensors.items()} | changes
    shutil.rmtree(folder)
    kept = {name: a for name, a in arrays.items() if a is not None}
    planned = [hf_files.Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in kept.items()]
    hf_files.write_folder(folder, planned, opened.config)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"model_type": "lama"}, "model_type=\"lama\".*did you mean 'llama'"),
        ({"hidden_act": "tanh"}, "hidden_act='tanh'; supported: silu"),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            "rope type 'spiral'; supported: default, lin",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"clip_everything": 3}, "options that shardlm does not know.*clip_everything=3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq.*supported are quant_method fp8"),
        ({"hidden_size": None}, "config.json has no 'hidden_size', which a 'llama' model needs"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    ],
)
def test_an_option_that_is_not_supported_is_refused_by_name(llama, changes, message):
    change_config(llama, **changes)
    with pytest.raises(ShardlmError, match=message):
        shardlm.load(llama)


def test_tensors_that_do_not_fit_are_all_named(llama):
    change_tensors(
        llama,
        **{
            "model.norm.weight": None,
            "model.surprise": np.zeros(3, np.float32),
            "lm_head.weight": np.zeros((95, 32), np.float32),
        },
    )
    with pytest.raises(ShardlmError) as refused:
        shardlm.load(llama)
    for part in ("lm_head.weight is [95, 32] and the model needs [96, 32]", "model.norm.weight is missing"):
        assert part in str(refused.value)
    assert "model.surprise is not known" in str(refused.value)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ShardlmError, match="there is no folder"):
        shardlm.load(tmp_path / "nothing")
    with pytest.raises(ShardlmError, match=r"pip install 'shardlm\[hub\]'|hub did not give it"):
        shardlm.load("nobody/nothing")
    with pytest.raises(ShardlmError, match="needs 64 devices and there are 8"):
        shardlm.load(REFERENCES / "llama", mesh=MeshSpec(fsdp=64))
    with pytest.raises(ShardlmError, match="dtype='int3'; choose from float32"):
        shardlm.load(REFERENCES / "llama", dtype="int3")


def test_each_device_reads_its_own_slices(monkeypatch):
    """By accounting: with fsdp=8 the largest array on the host is an eighth of the largest tensor, and together the
    devices read what is in the files once, but for what is whole on every device."""
    arrays = []
    read = hf_files.Stored.read
    monkeypatch.setattr(hf_files.Stored, "read", lambda self, index: arrays.append(read(self, index)) or arrays[-1])
    folder = hf_files.Folder.open(REFERENCES / "llama")
    spec = MeshSpec(fsdp=8)
    with jax.set_mesh(mesh_of(spec)) as _:
        model = ModelDef.make(registry.transformer(folder.config), Execution(Rules.make("zero3", spec)))
        shapes = jax.tree.map(lambda s: at_rest(s, mesh_of(spec)), model.shapes)
        weights.load(model, folder, shapes)
    assert max(a.nbytes for a in arrays) == 96 * 32 * 2 / 8  # the embedding, in 16 bits
    matrices = sum(s.dtype.itemsize * np.prod(s.shape) for s in folder.tensors.values() if len(s.shape) == 2)
    assert sum(a.nbytes for a in arrays if a.ndim == 2) == matrices


def run(module, *flags):
    return subprocess.run([sys.executable, "-m", module, *flags], capture_output=True, text=True, timeout=200)


def logits_of(opened, tokens):
    from shardlm.layers.context import Packed

    with jax.set_mesh(opened.mesh):
        lm = opened.model.model(opened.params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        ctx = Packed(jnp.ones_like(tokens), opened.model.execution.rules)
        return np.asarray(jax.jit(lambda t: lm.logits(lm(t, positions, ctx)[0]))(tokens))


def trained_on_chats(home, config):
    """The same folder on conversations: answers are scored, and the template stays with the run and what is written."""
    turns = [{"role": "user", "content": "def f1"}, {"role": "assistant", "content": "return x * 1"}]
    (home / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    (home / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                                     "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    flags = (f"data.train={home}/chats.jsonl", f"data.validation={home}/chats.jsonl", "data.packing=whole")
    flags += (f"data.chat_template={home}/chat.jinja", f"data.tokenizer={home}/hf", f"run_dir={home}/sft")
    done = tiny_run.train(config, *flags, "train.steps=6", "optim.schedule=constant")
    assert done.returncode == 0 and "bits/byte" not in done.stdout, done.stderr
    losses = [value for (_, name), value in tiny_run.losses(home / "sft").items() if name == "validation_loss"]
    assert losses[-1] < 5
    exported = run("launch.convert", f"--checkpoint={home}/sft", f"--output={home}/sft_hf")
    assert exported.returncode == 0, exported.stderr
    assert (home / "sft_hf" / "chat_template.jinja").read_text() == (home / "chat.jinja").read_text()


def trained_by_adapters(home, config):
    """The same folder by adapters on int4: a run resumes bit for bit, keeps its adapters only, and is what PEFT's files
    and the merged folder made of it are."""
    flags = (f"data.tokenizer={home}/hf", "lora.rank=4", "lora.base=int4", "optim.schedule=constant")
    flags += ("optim.ema_decay=0.0", "checkpoint.every_steps=2", "train.steps=4")
    done = tiny_run.train(config, *flags, f"run_dir={home}/lora")
    assert done.returncode == 0 and "parameters in adapters of rank 4, on " in done.stdout, done.stderr
    expected = tiny_run.losses(home / "lora")
    shutil.rmtree(home / "lora" / "checkpoints" / "4")
    again = tiny_run.train(config, *flags, f"run_dir={home}/lora")
    assert again.returncode == 0 and "resuming after step 2" in again.stdout, again.stderr
    assert tiny_run.losses(home / "lora") == expected
    text = (f"--text={home}/validation.txt", "--seq_len=32", f"--cache_dir={home}/data")
    scores = []
    for name, options in (("adapter", ()), ("merged", ("--merge", "--dtype=float32"))):
        written = run("launch.convert", f"--checkpoint={home}/lora", f"--output={home}/{name}", *options)
        assert written.returncode == 0, written.stderr
    for name in ("lora", "merged"):
        scores.append(run("launch.eval", f"--checkpoint={home}/{name}", *text))
        assert scores[-1].returncode == 0, scores[-1].stderr
    one, two = (json.loads(score.stdout)["loss"] for score in scores)
    assert abs(one - two) < 1e-4
    opened = shardlm.load(home / "adapter", dtype="float32")
    assert opened.model.execution.lora.rank == 4 and opened.tokenizer.vocab_size == 300


def test_a_folder_is_trained_further_and_written_back(tmp_path):
    """Trains a Hugging Face folder on text, writes the run as a folder, and that as a run again."""
    config = tiny_run.write(tmp_path)
    first = tiny_run.train(config, "train.steps=4", "optim.schedule=constant")
    assert first.returncode == 0, first.stderr
    exported = run("launch.convert", f"--checkpoint={tmp_path}/run", f"--output={tmp_path}/hf", "--dtype=float32")
    assert exported.returncode == 0 and "opens in transformers" in exported.stdout, exported.stderr
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(1, 12)
    before = logits_of(shardlm.load(tmp_path / "run", dtype="float32"), tokens)
    assert np.array_equal(logits_of(shardlm.load(tmp_path / "hf"), tokens), before)
    described = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert described["eos_token"] == "<|endoftext|>" and (tmp_path / "hf" / "tokenizer.json").exists()

    flags = (f"--text={tmp_path}/validation.txt", "--seq_len=32", "--fsdp=2", f"--cache_dir={tmp_path}/data")
    scores = [run("launch.eval", f"--checkpoint={tmp_path}/{name}", *flags) for name in ("run", "hf")]
    assert scores[0].returncode == 0 and scores[0].stdout == scores[1].stdout, scores[0].stderr + scores[1].stderr
    assert set(json.loads(scores[0].stdout)) == {"loss", "perplexity", "bits_per_byte", "tokens"}

    chat = ("--chat", "--prompt=def", "--temperature=0", "--max_new_tokens=8", f"--checkpoint={tmp_path}/hf")
    refused = run("launch.generate", *chat)
    assert refused.returncode == 1 and "has no chat template" in refused.stderr
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages[0].content }} f1(x")
    answer = run("launch.generate", *chat)
    continued = run("launch.generate", "--prompt=def f1(x", *chat[2:])
    assert answer.returncode == 0 and "def f1(x" + answer.stdout == continued.stdout, answer.stderr

    text = pathlib.Path(config).read_text()
    start = text.index("model=LlamaConfig(")
    stop = text.index("),", start) + 1
    further = tmp_path / "further.py"
    opened = f"model=Pretrained({str(tmp_path / 'hf')!r})"
    further.write_text("from shardlm.models.pretrained import Pretrained\n" + text[:start] + opened + text[stop:])
    flags = (f"run_dir={tmp_path}/more", "train.steps=4", "optim.schedule=constant", f"data.tokenizer={tmp_path}/hf")
    done = tiny_run.train(further, *flags)
    assert done.returncode == 0 and f"starting from the weights of {tmp_path}/hf" in done.stdout, done.stderr
    trained_on_chats(tmp_path, further)
    trained_by_adapters(tmp_path, further)
    shutil.rmtree(tmp_path / "hf")  # a run outlives the folder it began from
    assert not np.array_equal(logits_of(shardlm.load(tmp_path / "more", dtype="float32"), tokens), before)
    again = tiny_run.train(further, *flags[:1], "train.steps=6", *flags[2:])
    assert again.returncode == 1 and "config.json is not there" in again.stderr + again.stdout
    exported = run("launch.convert", f"--checkpoint={tmp_path}/more", f"--output={tmp_path}/hf2", "--dtype=float32")
    assert exported.returncode == 0, exported.stderr
    back = run("launch.convert", f"--checkpoint={tmp_path}/hf2", f"--output={tmp_path}/run2")
    assert back.returncode == 0, back.stderr
    opened = [shardlm.load(tmp_path / name, dtype="float32") for name in ("hf2", "run2", "more")]
    one, two, three = (logits_of(each, tokens) for each in opened)
    assert np.array_equal(one, two) and np.array_equal(one, three)
    refused = run("launch.convert", f"--checkpoint={tmp_path}/hf2", f"--output={tmp_path}/run2")
    assert refused.returncode == 1 and "exists; choose another output folder" in refused.stderr
