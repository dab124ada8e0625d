"""Opening and converting as a user does: `shardlm.load`, `launch.convert`, fine-tuning a folder, and the refusals."""

import json
import math
import mmap
import pathlib
import re
import shutil
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import tiny_run
from commands import run
from small import mesh_of

import shardlm
from shardlm import hf_files, opened, weights
from shardlm.errors import ShardlmError
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.rules import Rules
from shardlm.state import ModelDef, at_rest
from shardlm.train import report
from shardlm.train.convert import to_hf

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
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method='aqlm'; supported are auto-round, awq, bits"),
        ({"hidden_size": None}, "config.json has no 'hidden_size', which a 'llama' model needs"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers='three'; it needs a whole number of at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1; it needs a whole number of at least 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0; it needs a number above 0"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    ],
)
def test_an_option_that_is_not_supported_is_refused_by_name(llama, changes, message):
    change_config(llama, **changes)
    with pytest.raises(ShardlmError, match=message):
        shardlm.load(llama)


def test_a_broken_generation_config_is_named(llama):
    for text, message in (("{oops", "generation_config.json is not JSON"), ("[]", "holds a JSON list and not an obj")):
        (llama / "generation_config.json").write_text(text)
        with pytest.raises(ShardlmError, match=message):
            opened.Opened.generation.fget(types.SimpleNamespace(folder=llama))


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


def test_what_transformers_writes_otherwise_than_published_is_said(tmp_path):
    """Kimi Linear's dense layers, as save_pretrained of transformers 5.24 names them."""
    folder = shutil.copytree(REFERENCES / "kimi_linear", tmp_path / "kimi_linear")
    there = hf_files.Folder.open(folder).tensors
    down = next(name for name in there if name.endswith(".mlp.down_proj.weight"))
    array = there[down].read(...)
    change_tensors(folder, **{down: None, down.replace(".mlp.", ".block_sparse_moe."): array})
    with pytest.raises(ShardlmError, match=r"block_sparse_moe.* is not known. save_pretrained .* rename"):
        shardlm.load(folder)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ShardlmError, match="there is no folder"):
        shardlm.load(tmp_path / "nothing")
    with pytest.raises(ShardlmError, match=r"pip install 'shardlm\[hub\]'|hub did not give it: .*OWNER/NAME"):
        shardlm.load("nobody/nothing")
    with pytest.raises(ShardlmError, match="needs 64 devices and there are 8"):
        shardlm.load(REFERENCES / "llama", mesh=MeshSpec(fsdp=64))
    with pytest.raises(ShardlmError, match="dtype='int3'; choose from float32"):
        shardlm.load(REFERENCES / "llama", dtype="int3")


def shaped_like_70b(path):
    """Llama 3 70B with all sizes but the number of files divided: 32 MB in eight files and an index."""
    heads = {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 16}
    config = {"model_type": "llama", "vocab_size": 4000, "hidden_size": 256, "intermediate_size": 896, **heads}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "dtype": "bfloat16"}
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = ModelDef.make(registry.transformer(config), Execution(Rules.make("zero3", MeshSpec())))
    ones = jax.tree.map(lambda s: np.ones(s.shape, jnp.bfloat16), model.shapes)

    def names(block):
        return registry.names(config, model.config, block)

    planned = weights.planned(model.config, ones, names, np.dtype(jnp.bfloat16))
    hf_files.write_folder(path, planned, config, shard_bytes=4_400_000)
    return hf_files.Folder.open(path)


def test_the_host_holds_one_slice_at_a_time_and_every_number_is_read_once(tmp_path, monkeypatch):
    """By accounting of numpy's memory and of what is asked of the files; devices that hold the same share a reading."""
    folder, put, read = shaped_like_70b(tmp_path / "f"), jax.device_put, hf_files.Stored.read

    def copied(a, device):
        """CPU "devices" would keep the host's arrays as theirs: they get copies in memory that is not traced."""
        own = np.frombuffer(mmap.mmap(-1, a.nbytes), np.uint8).view(a.dtype).reshape(a.shape)
        own[...] = a
        return put(own, device)

    monkeypatch.setattr(jax, "device_put", copied)
    assert len({stored.file for stored in folder.tensors.values()}) == 8
    times, largest = {}, {}

    def counted(stored, index):
        key = stored.file, stored.begin
        times.setdefault(key, np.zeros(stored.shape, np.uint8))[index] += 1
        found = read(stored, index)
        largest[key] = max(largest.get(key, 0), found.size)
        return found

    for preset, spec in (("zero3", MeshSpec(fsdp=4, tensor=2)), ("hybrid", MeshSpec(data=2, fsdp=2, tensor=2))):
        mesh = mesh_of(spec)
        with jax.set_mesh(mesh):
            model = ModelDef.make(
                registry.transformer(folder.config), Execution(Rules.make(preset, spec), jnp.bfloat16)
            )
            shapes = model.held_at_rest(mesh)
            with monkeypatch.context() as patch:
                patch.setattr(hf_files.Stored, "read", counted)
                weights.load(model, folder, shapes)
            tracemalloc.start()
            weights.load(model, folder, shapes)
            held = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert len(times) == len(folder.tensors) and all((count == 1).all() for count in times.values())
        shards = spec.fsdp * spec.tensor
        assert all(n == times[key].size / shards for key, n in largest.items() if times[key].ndim == 2)
        slices = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(shapes)]
        slice_bytes = 2 * max(map(math.prod, slices))
        assert held < 1.6 * slice_bytes, (held, slice_bytes)  # one, a layer of it being read, and what is no array
        times.clear(), largest.clear()


def test_reading_and_writing_show_their_progress_on_a_terminal_only(monkeypatch, capsys, tmp_path):
    calls = []
    folder = hf_files.Folder.open(REFERENCES / "gpt_oss")
    spec = MeshSpec(fsdp=2)
    with jax.set_mesh(mesh_of(spec)) as _:
        model = ModelDef.make(registry.transformer(folder.config), Execution(Rules.make("zero3", spec)))
        shapes = jax.tree.map(lambda s: at_rest(s, mesh_of(spec)), model.shapes)
        weights.load(model, folder, shapes, lambda *done: calls.append(done))
    total = sum(stored.nbytes for stored in folder.tensors.values())
    assert calls[-1] == (total, total) and {t for _, t in calls} == {total} and calls == sorted(calls)

    shardlm.load(REFERENCES / "llama")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what is no terminal as one
    shardlm.load(REFERENCES / "llama")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"reading weights .*?(\S+)/\1 KiB \d+\.\d\d GiB/s", shown), shown


def logits_of(opened, tokens):
    with jax.set_mesh(opened.mesh):
        return np.asarray(jax.jit(lambda t: small.logits_of(opened.model, opened.params, t))(tokens))


def trained_on_chats(home, config):
    """The same folder on conversations: answers are scored, and the template stays with the run and what is written."""
    turns = [{"role": "user", "content": "def f1"}, {"role": "assistant", "content": "return x * 1"}]
    (home / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    template = home / "template"
    (template / "additional_chat_templates").mkdir(parents=True)
    (template / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (template / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                                     "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    flags = (f"data.train={home}/chats.jsonl", f"data.validation={home}/chats.jsonl", "data.packing=whole")
    flags += (f"data.chat_template={template}", f"data.tokenizer={home}/hf", f"run_dir={home}/sft")
    done = tiny_run.train(config, *flags, "train.steps=6", "optim.schedule=constant")
    assert done.returncode == 0 and "bits/byte" not in done.stdout, done.stderr
    losses = [value for (_, name), value in tiny_run.losses(home / "sft").items() if name == "validation_loss"]
    assert losses[-1] < 5
    exported = run("launch.convert", f"--checkpoint={home}/sft", f"--output={home}/sft_hf")
    assert exported.returncode == 0, exported.stderr
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (home / "sft_hf" / name).read_text() == (template / name).read_text()


def trained_on_preferences(home, config):
    """The same folder on pairs, by all weights: a run begins at log 2, learns what is preferred, resumes bit for bit
    and is written as any other is."""
    pairs = [{"prompt": f"def f{i}", "chosen": f"return x * {i}", "rejected": f"y - {i}"} for i in range(40)]
    (home / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = (f"data.train={home}/pairs.jsonl", f"data.validation={home}/pairs.jsonl", "data.packing=pairs")
    flags += (f"data.chat_template={home}/template", f"data.tokenizer={home}/hf", "preference.beta=0.1")
    flags += ("optim.schedule=constant", "checkpoint.every_steps=2", "train.steps=4", "train.seq_len=128")
    flags += ("train.accumulation=2", "train.eval_every=2", f"run_dir={home}/dpo")
    done = tiny_run.train(config, *flags)
    assert done.returncode == 0 and "40 pairs to train on" in done.stdout, done.stderr
    expected = tiny_run.losses(home / "dpo")
    assert abs(expected[1, "loss"] - math.log(2)) < 1e-6 and "averaged weights" in done.stdout
    assert expected[4, "validation_loss"] < expected[2, "validation_loss"] < expected[1, "loss"]
    lines = [json.loads(line) for line in (home / "dpo" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["validation_reward_accuracy"] > 0.9 and lines[-1]["validation_reward_margin"] > 0
    shutil.rmtree(home / "dpo" / "checkpoints" / "4")
    again = tiny_run.train(config, *flags)
    assert again.returncode == 0 and "resuming after step 2" in again.stdout, again.stderr
    assert tiny_run.losses(home / "dpo") == expected
    exported = run("launch.convert", f"--checkpoint={home}/dpo", f"--output={home}/dpo_hf")
    assert exported.returncode == 0, exported.stderr


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
    told = home / "lora" / "config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"precision": "bf16"}))
    to_hf(home / "lora", home / "in_full", "float32", merge=True)  # of a run in 16 bits too sums are not rounded
    whole, merged = (hf_files.Folder.open(home / name).tensors for name in ("in_full", "merged"))
    assert all(np.array_equal(whole[name].read(...), merged[name].read(...)) for name in merged)
    opened = shardlm.load(home / "adapter", dtype="float32")
    assert opened.model.execution.lora.rank == 4 and opened.tokenizer.vocab_size == 300


def in_few_bits(trained, folder):
    """A run and the folder it was written as are held in the same numbers where they are served."""
    for how, mesh in (("int4", MeshSpec(tensor=2)), ("fp8_dynamic", MeshSpec(tensor=2)), ("int8", MeshSpec())):
        options = {"quantization": how, "decoding": True, "dtype": "float32", "mesh": mesh}
        one, other = (shardlm.load(path, **options).params for path in (trained, folder))
        kinds = {a.dtype.name for a in jax.tree.leaves(one)}
        assert kinds & {"int8", "float8_e4m3fn"}
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert a.sharding == b.sharding and np.array_equal(a, b)


@pytest.mark.wide
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
    in_few_bits(tmp_path / "run", tmp_path / "hf")
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
    trained_on_preferences(tmp_path, further)
    shutil.rmtree(tmp_path / "hf")  # a run outlives the folder it began from
    assert not np.array_equal(logits_of(shardlm.load(tmp_path / "more", dtype="float32"), tokens), before)
    again = tiny_run.train(further, *flags[:1], "train.steps=6", *flags[2:])
    assert again.returncode == 1 and "config.json is not there" in again.stderr + again.stdout
    exported = run("launch.convert", f"--checkpoint={tmp_path}/more", f"--output={tmp_path}/hf2", "--dtype=float32")
    assert exported.returncode == 0, exported.stderr
    back = run("launch.convert", f"--checkpoint={tmp_path}/hf2", f"--output={tmp_path}/run2")
    assert back.returncode == 0, back.stderr
    assert f"{report.python()} -m launch.generate --checkpoint={tmp_path}/run2 --prompt='" in back.stdout
    opened = [shardlm.load(tmp_path / name, dtype="float32") for name in ("hf2", "run2", "more")]
    one, two, three = (logits_of(each, tokens) for each in opened)
    assert np.array_equal(one, two) and np.array_equal(one, three)
    refused = run("launch.convert", f"--checkpoint={tmp_path}/hf2", f"--output={tmp_path}/run2")
    assert refused.returncode == 1 and "exists; choose another output folder" in refused.stderr
