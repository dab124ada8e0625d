"""Images in every form that requests have, as pixels."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from shardlm.errors import ShardlmError
from shardlm.vision import read
from shardlm.vision.read import BadImage, pixels_of

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (5, 7, 3), np.uint8)
FLAT = np.full((16, 24, 3), (200, 60, 20), np.uint8)


def file(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "GIF", "JPEG"])
def test_formats(kind):
    options = {"WEBP": {"lossless": True}}.get(kind, {})
    pixels = FLAT if kind in ("GIF", "JPEG") else PIXELS
    found = pixels_of(file(Image.fromarray(pixels), kind, **options))
    assert found.dtype == np.uint8 and found.flags["C_CONTIGUOUS"] and found.shape == pixels.shape
    near = 3 if kind == "JPEG" else 0  # which rounds colours
    assert np.abs(found.astype(int) - pixels).max() <= near


def test_the_same_image_in_every_form():
    data = file(Image.fromarray(PIXELS))
    url = data_url(data)
    spaced = url[:60] + "\n " + url[60:]
    for form in (data, bytearray(data), url, spaced, url.replace("data:", "DATA:"), Image.fromarray(PIXELS), PIXELS):
        np.testing.assert_array_equal(pixels_of(form), PIXELS)
    np.testing.assert_array_equal(pixels_of(data_url(data, "image/png;charset=x")), PIXELS)
    assert not np.shares_memory(pixels_of(data), PIXELS)


def test_transparency_is_on_white():
    alpha = np.array([[0, 255, 128]], np.uint8)
    colours = np.dstack([np.full((1, 3, 3), 100, np.uint8), alpha])
    expected = [[[255] * 3, [100] * 3, [177] * 3]]
    rgba = Image.fromarray(colours)
    np.testing.assert_array_equal(pixels_of(file(rgba)), expected)
    np.testing.assert_array_equal(pixels_of(rgba), expected)
    np.testing.assert_array_equal(pixels_of(colours), expected)
    np.testing.assert_array_equal(pixels_of(file(rgba.convert("LA"))), expected)
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    np.testing.assert_array_equal(pixels_of(file(palette)), [[[10, 20, 30], [40, 50, 60]]])
    np.testing.assert_array_equal(pixels_of(file(palette, transparency=0)), [[[255] * 3, [40, 50, 60]]])
    marked = Image.fromarray(np.full((1, 1, 3), 9, np.uint8))
    np.testing.assert_array_equal(pixels_of(file(marked, transparency=(9, 9, 9))), [[[255] * 3]])


def test_greys_of_any_depth_and_print_colours():
    grey = np.array([[0, 7, 255]], np.uint8)
    np.testing.assert_array_equal(pixels_of(file(Image.fromarray(grey)))[..., 1], grey)
    np.testing.assert_array_equal(pixels_of(grey[..., None])[..., 2], grey)
    deep = np.array([[0, 256 * 7 + 9, 65535]], np.uint16)
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(pixels_of(file(Image.fromarray(deep), kind))[..., 0], grey)
    np.testing.assert_array_equal(pixels_of(Image.fromarray(deep.astype(np.int32)))[..., 0], grey)
    bits = Image.fromarray(grey > 100)
    np.testing.assert_array_equal(pixels_of(file(bits))[..., 0], [[0, 0, 255]])
    cmyk = Image.fromarray(FLAT).convert("CMYK")
    assert np.abs(pixels_of(file(cmyk, "JPEG")).astype(int) - FLAT).max() < 6


def test_of_several_frames_the_first():
    frames = [Image.fromarray(np.full((4, 4, 3), shade, np.uint8)) for shade in (10, 200)]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})):
        data = file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        np.testing.assert_array_equal(pixels_of(data), np.full((4, 4, 3), 10))
    mpo = file(frames[0], "MPO", save_all=True, append_images=frames[1:])  # as telephones write their photographs
    assert np.abs(pixels_of(mpo).astype(int) - 10).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_stand_upright(orientation):
    """As viewers turn them: the marks of the corners are where Exif says that the camera's were."""
    upright = np.zeros((2, 3, 3), np.uint8)
    upright[0, 0], upright[0, 2] = (250, 0, 0), (0, 250, 0)
    # Of the stored image, by the orientation's definition (Exif 2.3, table 6): which edge its row 0 and column 0 are.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    np.testing.assert_array_equal(pixels_of(data), upright)
    np.testing.assert_array_equal(pixels_of(Image.open(io.BytesIO(data))), upright)


def test_broken_exif_is_no_broken_image():
    np.testing.assert_array_equal(pixels_of(file(Image.fromarray(PIXELS), exif=b"Exif\0\0MM\0*\xff\xff\xff")), PIXELS)


def bomb(width, height):
    """A PNG that says it is so large, with nothing in it."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_sizes_are_refused_before_anything_is_unpacked(monkeypatch):
    monkeypatch.setattr(read, "_unpacked", None)
    with pytest.raises(BadImage, match=r"has 8193 x 8193 pixels; at most 67108864 are read, and 32768 of a side"):
        pixels_of(bomb(8193, 8193))
    with pytest.raises(BadImage, match=r"has 40000 x 1 pixels"):
        pixels_of(bomb(40_000, 1))
    with pytest.raises(BadImage, match=r"too large: at most 67108864 pixels"):
        pixels_of(bomb(100_000, 100_000))
    with pytest.raises(BadImage, match=r"has 40000 x 1 pixels"):
        pixels_of(Image.new("1", (40_000, 1)))
    with pytest.raises(BadImage, match=r"has 0 x 4 pixels"):
        pixels_of(np.zeros((4, 0, 3), np.uint8))
    with pytest.raises(BadImage, match=r"file has 33554433 bytes; at most 33554432"):
        pixels_of(bytes(read.MAX_BYTES + 1))
    with pytest.raises(BadImage, match=r"in base64 has 67108865 characters"):
        pixels_of("data:;base64," + "A" * (2 * read.MAX_BYTES + 1))


def tiled(side):
    """A TIFF of 16 x 16 pixels in one tile of `side`, unpacked a thousand times as large as it is."""
    data = zlib.compress(bytes(side * side))
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side), (324, 0), (325, 0)]
    values = dict(tags) | {324: 14 + 12 * len(tags), 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + data


def test_tiles_are_as_large_as_an_image_at_most(monkeypatch):
    assert pixels_of(tiled(64)).shape == (16, 16, 3)
    monkeypatch.setattr(read, "_unpacked", None)
    for side in (8200, 32768):  # of 1 GiB, in 1 MB
        head = tiled(64).replace(struct.pack("<HHII", 322, 4, 1, 64), struct.pack("<HHII", 322, 4, 1, side))
        with pytest.raises(BadImage, match=rf"has {side} x {side} pixels; at most"):
            pixels_of(head.replace(struct.pack("<HHII", 323, 4, 1, 64), struct.pack("<HHII", 323, 4, 1, side)))


def test_scans_of_a_jpeg_are_counted(monkeypatch):
    plain = file(Image.fromarray(FLAT), "JPEG", progressive=True)
    last = plain[plain.rindex(b"\xff\xc4") : -2]  # its last scan, with the table before
    few, many = (plain[:-2] + last * count + plain[-2:] for count in (50, 100))
    np.testing.assert_array_equal(pixels_of(few).shape, FLAT.shape)
    # What follows the image, such as a film of the same moment, and what says something about it may have such bytes.
    noted = plain[:2] + b"\xff\xfe" + struct.pack(">H", 1002) + b"\xff\xda" * 500 + plain[2:]
    for more in (plain + b"\xff\xda" * 200, noted):
        assert pixels_of(more).shape == FLAT.shape
    filled = many.replace(b"\xff\xda", b"\xff\xff\xff\xda")  # as the format allows
    segments = plain[:2] + b"\xff\xfe\0\x02" * 5000 + many[2:]
    monkeypatch.setattr(read, "_unpacked", None)
    for data in (many, filled, noted[:-2] + last * 100):
        with pytest.raises(BadImage, match="has more than 100 scans; save it again"):
            pixels_of(data)
    with pytest.raises(BadImage, match="has more than 4096 segments; save it again"):
        pixels_of(segments)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "GIF", "JPEG"])
def test_files_that_are_cut_off_or_changed(kind):
    """Whatever comes of it, no other error does, and what is cut off is no image."""
    data = file(Image.fromarray(RNG.integers(0, 256, (40, 40, 3), np.uint8)), kind)
    with pytest.raises(BadImage, match=r"cannot be read|data is broken|or broken"):
        pixels_of(data[: len(data) // 2])
    for _ in range(100):
        spoilt = bytearray(data)
        for at in RNG.integers(0, min(len(data), 400), 4):
            spoilt[at] = RNG.integers(256)
        try:
            assert pixels_of(spoilt).shape[2] == 3
        except BadImage as error:
            assert isinstance(error, ShardlmError)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"", "file is empty; it is none of PNG, JPEG"),
        (b"<svg xmlns='x'/>", r"begin with b\"<svg xmlns='\"; it is none of"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG"),  # which Pillow would run Ghostscript on
        ("https://example.com/a.png", "address is 'https://example.com/a.png'; it is data:image/png;base64"),
        ("data:image/svg+xml,<svg/>", "must be in base64"),
        ("data:" + ";" * 1000 + ";base64,aGk=", "address is 'data:;;;;"),
        ("data:image/png;base64,%%%", "is not in base64"),
        ("data:image/png;base64,abc", "is not in base64"),
        (7, "an image is a int; give a PIL.Image"),
        (np.zeros((3, 8, 8), np.uint8), r"array uint8 \[3, 8, 8\]; it is uint8 \[height, width, 3\]"),
        (np.zeros((8, 8, 3), np.float32), r"array float32 \[8, 8, 3\]"),
        (np.zeros((1, 8, 8, 3), np.uint8), r"array uint8 \[1, 8, 8, 3\]"),
        (Image.new("F", (2, 2)), "float32, whose range"),
        (Image.fromarray(np.array([[-1, 70000]], np.int32)), "greys from -1 to 70000"),
    ],
)
def test_what_is_no_image(image, words):
    with pytest.raises(BadImage, match=words):
        pixels_of(image)
