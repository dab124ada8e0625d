"""Images in shards, rows and batches: their places, what is read of them, and files that are not as they were."""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import shutil

import msgspec
import numpy as np
import pytest
from made_documents import documents_of
from seen_chats import PLACE, png, said, shards_of, sight, tokenizer

from shardlm.chat import ChatTemplate
from shardlm.data.config import DataConfig
from shardlm.data.loader import Loader, validation_batches
from shardlm.data.packing import PADDING_ROW, make_rows
from shardlm.data.preferences import pair
from shardlm.data.prepare import prepare
from shardlm.data.shards import TokenShards
from shardlm.data.writer import ShardWriter
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder
from shardlm.tokenizer import Tokenizer
from shardlm.vision.axes import axes_of
from shardlm.vision.read import pixels_of
from shardlm.vision.registry import sight_of

REFERENCES = pathlib.Path(__file__).parent.parent / "vision" / "references"
FILES = [png(32, 48, 0), png(16, 32, 1), png(48, 16, 2)]


def line(*images, words="fox"):
    places = [part for image in images for part in ({"type": "image", "path": f"{image}.png"}, words)]
    return {"messages": [said("user", *places, words), said("assistant", "the dog")]}


LINES = [line(0), line(), line(1, 2), line(words="the lazy dog jumps over the fox"), line(2, 0), line(1), line(0, 0, 1)]


@pytest.fixture
def folder(tmp_path):
    for number, file in enumerate(FILES):
        (tmp_path / f"{number}.png").write_bytes(file)
    return tmp_path


@pytest.fixture(params=[False, True], ids=["positions", "axes"])
def own(request):
    return sight(request.param)


def documents(shards, own):
    """(tokens, what is placed in them) of each line, of the sight itself."""
    offsets = shards.document_offsets()
    for number, (start, stop) in enumerate(itertools.pairwise(offsets)):
        numbers = [
            int(part["path"][0])
            for message in LINES[number]["messages"]
            for part in (message["content"] if isinstance(message["content"], list) else ())
            if part["type"] == "image"
        ]
        yield shards.window(start, stop - start), numbers


def look(images):
    return list(images)


def place_of_documents(batch, shards):
    """(row, columns, document) of each segment."""
    offsets = shards.document_offsets()
    known = {shards.window(a, b - a)[:-1].tobytes(): n for n, (a, b) in enumerate(itertools.pairwise(offsets))}
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segment_ids"][row].max(initial=0) + 1):
            at = np.flatnonzero(batch["segment_ids"][row] == segment)
            yield row, at, known[batch["tokens"][row][at].tobytes()]


@pytest.mark.parametrize("shard_tokens", [1, 60, 1 << 20])
def test_images_stand_where_their_tokens_are(folder, own, shard_tokens, monkeypatch):
    monkeypatch.setattr(ShardWriter.__init__, "__defaults__", (shard_tokens, None))
    shards = shards_of(LINES, folder, own)
    shards.verify()
    assert (len(list(shards.directories[0].glob("*.tokens"))) > 1) == (shard_tokens < 1 << 20)
    rows = make_rows(shards, 80, "whole", own.axes)
    batch = rows.read([*range(len(rows)), PADDING_ROW])
    images = list(rows.images([*range(len(rows)), PADDING_ROW]))
    assert len(images) == 9 == len(shards.image_places())
    assert ("turns" in batch) == own.axes
    seen = 0
    for row, at, document in place_of_documents(batch, shards):
        tokens, numbers = list(documents(shards, own))[document]
        here = [(place, image) for r, place, image in images if r == row and place in at]
        assert [shards.image_file(image) for _, image in here] == [FILES[number] for number in numbers]
        seen += len(here)
        for (place, image), number in zip(here, numbers, strict=True):
            picture = own.prepare(pixels_of(FILES[number]))
            assert (image.grid, image.patches) == (picture.grid, picture.patches)
            takes = shards.takes(image) + place
            assert (batch["tokens"][row][takes] == own.vector).all() and len(takes) == picture.vectors
            assert not batch["loss_mask"][row][place - 1 : place + image.end - image.first - 1].any()
            assert batch["tokens"][row][place : place + image.end - image.first].tolist() == own.tokens(picture)
        if own.axes:
            pictures = [own.prepare(pixels_of(FILES[number])) for number in numbers]
            short = [id for i, id in enumerate(tokens) if id != own.vector or tokens[i - 1] != own.vector]
            ids, placed = own.expanded(short, pictures)
            np.testing.assert_array_equal(ids, tokens)
            np.testing.assert_array_equal(batch["turns"][row][at], axes_of(len(ids), placed)[0].T[:-1])
            if not numbers:
                np.testing.assert_array_equal(
                    batch["turns"][row][at], np.repeat(batch["positions"][row][at], 3).reshape(-1, 3)
                )
    assert seen == len(images)
    assert not any(array[-1].any() or array[batch["segment_ids"] == 0].any() for array in batch.values())


def test_every_file_is_kept_once(folder):
    made = shards_of(LINES, folder, sight())
    [files] = made.directories[0].glob("*.files")
    assert files.stat().st_size == sum(map(len, FILES))


def test_turns_of_text_are_positions(make_shards):
    shards = make_shards(documents_of([3, 9, 30, 5]))
    for packing in ("cut", "whole"):
        batch = make_rows(shards, 8, packing, axes=True).read([*range(4), PADDING_ROW])
        assert batch["turns"].dtype == np.int32
        np.testing.assert_array_equal(batch.pop("turns"), np.repeat(batch["positions"][..., None], 3, -1))
        plain = make_rows(shards, 8, packing).read([*range(4), PADDING_ROW])
        assert plain.keys() == batch.keys()


def test_all_processes_see_the_images_of_the_whole_batch(folder, own):
    shards = shards_of(LINES, folder, own)
    options = {"seq_len": 60, "global_batch": 3, "seed": 5, "packing": "whole", "sight": own, "look": look}
    whole, parts = Loader(shards, **options), [Loader(shards, rows=rows, **options) for rows in ([0, 2], [1])]
    plain = Loader(shards, **options | {"look": None})
    for _ in range(7):
        batch, *others, blind = next(whole), *map(next, parts), next(plain)
        images = batch.pop("images")
        assert blind.keys() == batch.keys() and all((blind[name] == batch[name]).all() for name in batch)
        facts = [(one.row, one.takes.tolist(), one.patches) for one in images]
        assert facts and facts == sorted(facts)
        for rows, other in zip(([0, 2], [1]), others, strict=True):
            assert [(one.row, one.takes.tolist(), one.patches) for one in other.pop("images")] == facts
            assert all((batch[name][rows] == other[name]).all() for name in batch)
        for one in images:
            assert (batch["tokens"][one.row][one.takes] == own.vector).all() and one.takes.dtype == np.int32
            assert one.picture().patches == one.patches and one.picture().vectors == len(one.takes)
        assert sum((batch["tokens"] == own.vector).sum(axis=1)) == sum(len(one.takes) for one in images)
    digests = {own.prepare(pixels_of(file)).digest for file in FILES}
    assert {one.picture().digest for one in images} <= digests


def test_validation_sees_every_image_once(folder, own):
    shards = shards_of(LINES, folder, own)
    options = {"seq_len": 60, "global_batch": 3, "packing": "whole", "sight": own}
    batches = list(validation_batches(shards, look=look, **options))
    found = [one.picture().digest for batch in batches for one in batch["images"]]
    assert len(found) == 9 and not batches[-1]["tokens"][-1].any()
    part = list(validation_batches(shards, look=look, rows=[1], **options))
    assert [one.row for b in part for one in b["images"]] == [one.row for b in batches for one in b["images"]]
    assert all("images" not in batch for batch in validation_batches(shards, **options))


def test_text_is_as_it_was(make_shards, folder):
    """Batches without images, the format of shards, and the name of their content, which positions in data have."""
    shards = make_shards(documents_of([3, 17, 40]))
    options = {"seq_len": 8, "global_batch": 2, "seed": 0, "packing": "whole"}
    assert next(Loader(shards, sight=sight(), look=look, **options)).keys() == next(Loader(shards, **options)).keys()
    meta = json.loads((shards.directories[0] / "meta.json").read_text())
    assert meta["format"] == 1 and meta["shards"][0].keys() == {
        *("name", "num_tokens", "num_documents", "tokens_crc32", "offsets_crc32", "scored_crc32"),
    }
    before = [(meta["vocab_size"], meta["tokenizer"], meta["dtype"], meta["shards"])]
    assert shards.fingerprint == hashlib.sha256(msgspec.json.encode(before)).hexdigest()
    seen = shards_of([line(), line(words="dog")], folder, sight())
    assert seen.image_token is None and json.loads((seen.directories[0] / "meta.json").read_text())["format"] == 1


def test_shards_stand_alone(folder, tmp_path_factory):
    own = sight(True)
    shards = shards_of(LINES, folder, own)
    away = tmp_path_factory.mktemp("away") / "shards"
    shutil.move(shards.directories[0], away)
    for file in folder.glob("*.png"):
        file.unlink()
    moved = TokenShards.open(away)
    assert moved.fingerprint == shards.fingerprint
    moved.verify()
    [batch] = validation_batches(moved, seq_len=300, global_batch=1, packing="whole", sight=own, look=look)
    assert len({one.picture().digest for one in batch["images"]}) == 3
    both = TokenShards.open(away, away)
    batches = list(validation_batches(both, seq_len=300, global_batch=1, packing="whole", sight=own, look=look))
    assert sum(len(batch["images"]) for batch in batches) == 18


def test_other_images_are_another_dataset(folder):
    one = shards_of(LINES, folder, sight())
    (folder / "0.png").write_bytes(png(32, 48, 9))
    assert shards_of(LINES, folder, sight(), name="other").fingerprint != one.fingerprint


def test_files_that_are_not_as_they_were(folder):
    own = sight()
    shards = shards_of(LINES, folder, own)
    home = shards.directories[0]
    options = {"seq_len": 80, "global_batch": 1, "packing": "whole", "sight": own, "look": look}
    files, index = home / "00000.files", home / "00000.images"
    data, records = files.read_bytes(), index.read_bytes()
    files.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    images = [one for batch in validation_batches(TokenShards.open(home), **options) for one in batch["images"]]
    with pytest.raises(
        ShardlmError, match=r"00000\.tokens, document \d: .*00000\.files is damaged: the checksum of image \d"
    ):
        images[[len(one.takes) for one in images].index(6)].picture()
    with pytest.raises(ShardlmError, match=r"00000\.files is damaged: the checksum of image"):
        TokenShards.open(home).verify()
    files.write_bytes(data[:-1])
    with pytest.raises(
        ShardlmError, match=rf"00000\.files is damaged: it has {len(data) - 1} bytes, expected {len(data)}"
    ):
        TokenShards.open(home)
    files.unlink()
    with pytest.raises(ShardlmError, match=r"00000\.files is damaged: the file is missing"):
        TokenShards.open(home)
    files.write_bytes(data)
    index.write_bytes(records[48:96] + records[:48] + records[96:])
    with pytest.raises(ShardlmError, match=r"00000\.images is damaged: its images are not in order"):
        TokenShards.open(home)
    index.write_bytes(records[:16] + b"\x03" + records[17:])
    with pytest.raises(ShardlmError, match=r"00000\.images is damaged: its checksum"):
        TokenShards.open(home).verify()
    with pytest.raises(ShardlmError, match=r"00000\.tokens is damaged: image 0 has 6 tokens for 3 x 3 vectors"):
        list(validation_batches(TokenShards.open(home), **options))


def test_images_that_are_prepared_otherwise_now(folder):
    shards = shards_of(LINES, folder, sight())
    other = dataclasses.replace(sight(), prepare=lambda pixels: sight().prepare(np.repeat(pixels, 2, axis=0)))
    [batch] = validation_batches(shards, seq_len=300, global_batch=1, packing="whole", sight=other, look=look)
    with pytest.raises(
        ShardlmError,
        match=r"00000\.tokens, document \d: an image has \d x \d vectors .* is now prepared as .* restore data\.max",
    ):
        batch["images"][0].picture()
    for how in (look, None):
        with pytest.raises(
            ShardlmError, match=r"have the token 1, and the model's have 5: they were prepared for another"
        ):
            strange = dataclasses.replace(sight(), vector=5)
            Loader(shards, seq_len=300, global_batch=1, seed=0, packing="whole", sight=strange, look=how)


def test_images_are_not_cut(folder):
    shards = shards_of(LINES, folder, sight())
    with pytest.raises(ShardlmError, match=r"data\.packing=cut would cut images in two.*set data\.packing=whole"):
        make_rows(shards, 64, "cut")
    longest = np.diff(shards.document_offsets()).max() - 1
    make_rows(shards, longest, "whole")
    with pytest.raises(
        ShardlmError,
        match=rf"1 of 5 documents with images are longer than a row of {longest - 1} tokens, .* longest is {longest}\."
        r" Set train\.seq_len to at least that, make images smaller by data\.max_pixels",
    ):
        make_rows(shards, longest - 1, "whole")


def test_pairs_with_images(folder):
    own = sight(True)
    ask = said("user", PLACE, "fox?", PLACE)
    lines = [
        {"prompt": [ask], "chosen": "the dog", "rejected": "dog", "images": ["0.png", "1.png"]},
        {"chosen": [ask, said("assistant", "")], "rejected": [ask, said("assistant", PLACE)], "image": ["0.png"] * 2},
        {"prompt": "<image>fox", "chosen": "lazy", "rejected": "quick", "image": "2.png"},
    ]  # fmt: skip
    with pytest.raises(ShardlmError, match=r"chats\.jsonl:2 \(rejected\) has 2 images and 3 places"):
        shards_of(lines, folder, own, pair)
    shards = shards_of([lines[0], lines[2]], folder, own, pair)
    shards.verify()
    assert shards.num_documents == 4 and len(shards.image_places()) == 6
    rows = make_rows(shards, 80, "pairs", axes=True)
    batch = rows.read(range(len(rows)))
    files = [[FILES[0], FILES[1]]] * 2 + [[FILES[2]]] * 2
    images = list(rows.images(range(len(rows))))
    for row, at, document in place_of_documents(batch, shards):
        here = [image for r, place, image in images if r == row and place in at]
        assert [shards.image_file(image) for image in here] == files[document]
        assert batch["turns"][row][at][0].tolist() == [0, 0, 0]
        learned = batch["targets"][row][at][batch["loss_mask"][row][at] > 0]
        answer = ["the dog", "dog", "lazy", "quick"][document]
        assert tokenizer().decode(learned.tolist(), skip_special=False) == f"{answer}<|im_end|>\n"
    [whole] = validation_batches(shards, seq_len=300, global_batch=1, packing="pairs", sight=own, look=look)
    assert len(whole["images"]) == 6
    same = {"prompt": [said("user", {"type": "image", "path": "0.png"})], "chosen": "fox", "rejected": "dog"}
    apart = {"chosen": [*same["prompt"], said("assistant", "a")],
             "rejected": [said("user", {"type": "image", "path": "1.png"}), said("assistant", "b")]}  # fmt: skip
    with pytest.raises(ShardlmError, match="begin with different messages"):
        shards_of([apart], folder, own, pair, name="apart")


# The words of these tokenizers are t0, t1, ...
TEMPLATES = {
    "qwen2_5_vl": "{% for c in m.content %}{{ '<|image_pad|>' if c.type == 'image' else c.text }} {% endfor %}",
    "gemma3": "{% for c in m.content %}{{ '<begin>' if c.type == 'image' else c.text }}{% endfor %} ",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_small_checkpoints_prepare_their_conversations(folder, kind):
    """Once, and anew where images are prepared otherwise."""
    home = shutil.copytree(REFERENCES / kind, folder / kind)
    kept = json.loads((home / "tokenizer.json").read_text())
    if kind == "gemma3":  # an end of documents
        kept["model"]["vocab"]["<eos>"] = kept["model"]["vocab"].pop("t63")
        (home / "tokenizer.json").write_text(json.dumps(kept))
    assistant = "{% generation %}{{ m.content }}{% endgeneration %}"
    template = f"{{% for m in messages %}}{{% if m.content is string %}}{assistant} {{% else %}}{TEMPLATES[kind]}"
    (home / "chat_template.jinja").write_text(template + "{% endif %}{% endfor %}")
    own = sight_of(home, Folder.open(home).config)
    path = folder / "chats.jsonl"
    ask = said("user", "t1", PLACE, "t2\n", PLACE, "\n t3")
    path.write_text(json.dumps({"messages": [ask, said("assistant", "t7 t8")], "images": ["0.png", "1.png"]}) + "\n")
    config = DataConfig((str(path),), (str(path),), str(home), str(home), cache_dir=str(folder / "cache"))
    stages = []
    shards = prepare(config, lambda *told: stages.append(told), own).train
    assert stages[-1][0] == "rendering chats" and stages[-1][1] == stages[-1][2]
    assert prepare(config, lambda *told: pytest.fail("prepared twice"), own).train.fingerprint == shards.fingerprint
    batch = make_rows(shards, 400, "whole", own.axes).read([0])
    learned = Tokenizer.load(home).decode(batch["targets"][0][batch["loss_mask"][0] > 0].tolist())
    assert learned.split() == ["t7", "t8"]
    texts = ChatTemplate.load(home).render([ask, said("assistant", "t7 t8")])
    pictures = [own.prepare(pixels_of(FILES[number])) for number in (0, 1)]
    ids, placed = own.expanded(Tokenizer.load(home).encode(texts), pictures)
    assert shards.window(0, 10_000).tolist()[: len(ids)] == ids
    assert bool(own.joins) == (kind == "gemma3") and [one.first for one in shards.images(0, 10_000)] == [
        one.start for one in placed
    ]
    if own.axes:
        np.testing.assert_array_equal(batch["turns"][0][: len(ids) - 1], axes_of(len(ids), placed)[0].T[: len(ids) - 1])
    assert {one.picture().digest for one in next(iter(
        validation_batches(shards, seq_len=400, global_batch=1, packing="whole", sight=own, look=look)
    ))["images"]} == {picture.digest for picture in pictures}  # fmt: skip
    used = dataclasses.replace(config, train=(str(shards.directories[0]),), validation=(str(shards.directories[0]),))
    assert prepare(used, sight=own).train.fingerprint == shards.fingerprint
    with pytest.raises(
        ShardlmError, match=r"the shards of data\.train .* have images, and nothing says how they are seen"
    ):
        prepare(used)
    with pytest.raises(
        ShardlmError, match=r"chats\.jsonl:1 has images, and data\.chat_template .* is of no model that sees"
    ):
        prepare(config)
    if kind == "qwen2_5_vl":
        smaller = sight_of(home, Folder.open(home).config, {"max_pixels": 1024})
        assert prepare(config, sight=smaller).train.num_tokens < shards.num_tokens


def test_options_are_checked():
    with pytest.raises(ShardlmError, match=r"data\.max_pixels is -1: give a number of pixels, or 0"):
        DataConfig(max_pixels=-1)
