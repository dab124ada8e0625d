"""Files of videos: what is read of them, and that what is broken, huge or none is refused in words, in time."""

import io
import random

import numpy as np
import pytest
from films import file_of, film
from PIL import Image

from shardlm.vision import read, video, video_files
from shardlm.vision.video import BadVideo, video_of_frames
from shardlm.vision.video_files import video_of_file, video_of_url

FRAMES = film(12, 48, 64)
SHADES = np.stack([np.full((48, 64, 3), 20 * i, np.uint8) for i in range(12)])
KINDS = [("mp4", "libx264"), ("mov", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4")]


@pytest.fixture(scope="module")
def file():
    pytest.importorskip("av", reason="needs av, of the extra video")
    return file_of(SHADES, 8)


def shades(file: bytes, *indices: int) -> np.ndarray:
    return np.array(video_of_file(file).read(indices, lambda frame: frame.mean()))


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_films(kind, codec, file):
    """Frames by their number, without and with a count in the head."""
    made = file_of(SHADES, 8, kind, codec)
    video = video_of_file(made)
    assert (video.count, video.size, video.rate, video.of_file) == (12, (48, 64), 8.0, True)
    assert np.abs(shades(made, 0, 5, 6, 11) - np.array([0, 100, 120, 220])).max() < 6


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations(kind):
    out, images = io.BytesIO(), [Image.fromarray(frame) for frame in SHADES]
    images[0].save(out, kind, save_all=True, append_images=images[1:], duration=200)
    video = video_of_file(out.getvalue())
    assert (video.count, video.size, video.rate) == (12, (48, 64), 5.0)
    assert np.abs(shades(out.getvalue(), 0, 5, 11) - np.array([0, 100, 220])).max() < 3
    untimed = io.BytesIO()
    images[0].save(untimed, kind, save_all=True, append_images=images[1:], duration=0)
    assert (video_of_file(untimed.getvalue()).count, video_of_file(untimed.getvalue()).rate) == (12, 10.0)
    still = io.BytesIO()
    images[0].save(still, kind)
    with pytest.raises(BadVideo, match=f"a video's {kind} file does not move; send it as an image"):
        video_of_file(still.getvalue())


def test_an_animation_that_grows_is_refused():
    """A GIF's later frame may stand beyond the first."""
    out, images = io.BytesIO(), [Image.fromarray(frame) for frame in SHADES[:3]]
    images[0].save(out, "GIF", save_all=True, append_images=images[1:], duration=200)
    grown = bytearray(out.getvalue())
    last = grown.rindex(b"\x2c\0\0\0\0")  # its place from the left and the top
    grown[last + 1 : last + 5] = b"\xff\x1f\xff\x1f"
    with pytest.raises(read.BadImage, match="pixels; at most 67108864 are read"):
        video_of_file(bytes(grown))


def test_a_film_is_turned_as_it_was_held(file):
    """A matrix in its track's head, as telephones write it."""
    turned = bytearray(file_of(FRAMES, 8))
    head = turned.index(b"tkhd") + 4 + 40  # of version 0, behind its volume
    numbers = (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    turned[head : head + 36] = b"".join(number.to_bytes(4, "big", signed=True) for number in numbers)
    video = video_of_file(bytes(turned))
    [own], [usual] = video.read([3], np.array), video_of_file(file_of(FRAMES, 8)).read([3], np.array)
    assert video.size == (64, 48) and (own == np.rot90(usual, 3)).all()


def test_titles_that_are_no_text(file):
    import av

    out = io.BytesIO()
    with av.open(io.BytesIO(file)) as whole, av.open(out, "w", format="mp4") as titled:
        titled.metadata["title"] = "untitled"
        stream = titled.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(whole.streams.video[0]):
            packet.stream = stream
            if packet.dts is not None:
                titled.mux(packet)
    assert b"untitled" in out.getvalue()
    assert video_of_file(out.getvalue().replace(b"untitled", b"\xff\xfe\x80titl\xc3")).count == 12


def test_frames_that_are_not_shown(file):
    """Packets that a cut left for those after it, and VP8's that others alone refer to, are no frames."""
    import av

    out = io.BytesIO()
    with av.open(io.BytesIO(file_of(FRAMES, 8, codec="mpeg4"))) as whole, av.open(out, "w", format="mp4") as cut:
        stream = cut.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(whole.streams.video[0]):
            if packet.dts is not None:
                early = round(0.5 / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - early, packet.dts - early, stream
                cut.mux(packet)
    video = video_of_file(out.getvalue())
    assert video.count == 8 and len(video.read(range(8), np.array)) == 8
    hidden, packets = bytearray(file_of(FRAMES, 8, "webm", "libvpx")), []
    with av.open(io.BytesIO(bytes(hidden))) as container:
        packets += [bytes(packet) for packet in container.demux(container.streams.video[0]) if packet.size]
    hidden[hidden.index(packets[5])] &= ~0x10
    video = video_of_file(bytes(hidden))
    assert video.count == 11 and len(video.read([0, 10], np.array)) == 2


def test_what_is_no_video(file):
    for wrong, words in (
        (b"", "a video's file is empty; it is none of MP4"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "none of MP4, MOV, WebM"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "none of MP4"),
        (file[:600], "a video's file (cannot be read|has no frame)"),
        (file[:4] + b"ftyp" + bytes(4000), "a video's file (cannot be read|has no frames)"),
    ):
        with pytest.raises(BadVideo, match=words):
            video_of_file(wrong)
    for url in ("data:video/mp4;base64,%%", "https://a/b.mp4", "data:video/mp4,aa"):
        with pytest.raises(read.BadImage, match=r"not in base64|a video's address is"):
            video_of_url(url)
    with pytest.raises(BadVideo, match="a video is coded as gif; it is one of h264, hevc"):
        video_of_file(file_of(FRAMES, 8, "mov", "gif", pixels="rgb8"))


def test_heads_that_lie(file):
    """Sizes, and counts of frames, are those that are there."""
    lie = bytearray(file)
    sizes = lie.index(b"stsz") + 12
    lie[sizes : sizes + 4] = (2**31 - 1).to_bytes(4, "big")
    with pytest.raises(BadVideo, match="a video's file cannot be read"):
        video_of_file(bytes(lie))
    # 20 million samples of a byte each, in one chunk, whose tables would take 1.2 GB.
    many, count = bytearray(file), (2 * 10**7).to_bytes(4, "big")
    for box, numbers, at in ((b"stsz", b"\0\0\0\1" + count, 8), (b"stsc", count, 16), (b"stts", count, 12)):
        begin = many.index(box) + at
        many[begin : begin + len(numbers)] = numbers
    with pytest.raises(BadVideo, match="a video's file has no frame that can be shown"):
        video_of_file(bytes(many))
    wide = bytearray(file)
    at = wide.rindex(b"avc1") + 28
    wide[at : at + 4] = b"\x7f\xff\x7f\xff"
    assert video_of_file(bytes(wide)).size == (48, 64)


def test_bounds(file, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(BadVideo, match="at most 99 are read"):
        patch.setattr(video_files, "MAX_BYTES", 99)
        video_of_file(file)
    with monkeypatch.context() as patch, pytest.raises(BadVideo, match="a video has more than 5 frames; cut it"):
        patch.setattr(video_files, "MAX_FRAMES", 5)
        video_of_file(file)
    with monkeypatch.context() as patch, pytest.raises(BadVideo, match=r"frames of a video took more than 0 seconds"):
        patch.setattr(video, "READING", 0)
        video_of_file(file)
    with monkeypatch.context() as patch, pytest.raises(BadVideo, match=r"0 frames of a video took more than 0 seconds"):
        patch.setattr(video, "READING", 0)
        video_of_frames(FRAMES).read([0], np.array)
    with monkeypatch.context() as patch, pytest.raises(read.BadImage, match="64 x 48 pixels; at most 3000 are read"):
        patch.setattr(read, "MAX_PIXELS", 3000)
        video_of_file(file)
    with monkeypatch.context() as patch, pytest.raises(BadVideo, match="cannot be read: "):
        patch.setattr(video_files, "MAX_PIXELS", 3000)  # FFmpeg's own bound, of frames larger than the head says
        video_of_file(file)
    with (
        monkeypatch.context() as patch,
        video_files._ONE,
        pytest.raises(BadVideo, match="other videos of more than 3000"),
    ):
        patch.setattr(video_files, "LARGE", 3000)
        patch.setattr(video_files, "READING", 0.01)
        video_of_file(file)
    ended = video_of_file(file)
    with pytest.raises(BadVideo, match="a video ends before its frame 40: its file is cut off or broken"):
        ended.read([0, 40], np.array)


def test_damaged_files_are_refused(file):
    """Whatever is changed in one, it is read or refused as such."""
    rng, whole = random.Random(0), file_of(FRAMES, 8)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 3, 10, 60))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            video = video_of_file(bytes(damaged[: rng.choice((len(whole), rng.randrange(len(whole))))]))
            video.read(sorted({0, video.count - 1}), np.array)
        except read.BadImage:
            pass


def test_without_pyav(file, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(
        BadVideo, match=r"by PyAV, which is not installed: pip install 'shardlm\[video\]', or give frames"
    ):
        video_of_file(file)
