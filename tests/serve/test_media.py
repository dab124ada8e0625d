"""Images by their address: what is fetched, what never is, and how much."""

import asyncio
import base64
import contextlib
import http.server
import os
import socket
import threading
import time

import pytest

from shardlm.errors import ShardlmError
from shardlm.serve import media, media_http
from shardlm.serve.media import MediaRules, file_at, files_here
from shardlm.vision.read import BadImage

DATA = b"an image" * 100
NONE, HERE = MediaRules(), MediaRules(("127.0.0.1", "LocalHost"), media_seconds=5)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers)))
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/large":  # without a length
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(64):
                    self.wfile.write(bytes(2**20))
                    self.server.sent += 2**20
        elif self.path == "/told":
            self.send_response(200)
            self.send_header("content-length", str(10**9))
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            time.sleep(1)
        else:
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(DATA)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.sent = [], 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def port(server):
    server.asked.clear()
    return server.server_address[1]


def fetch(url, rules=NONE):
    return asyncio.run(file_at(url, rules))


def test_allowed_by_name_an_image_comes(server, port):
    for host in ("127.0.0.1", "localhost", "LOCALHOST"):
        assert fetch(f"http://{host}:{port}/a.png", HERE) == DATA
    assert fetch(f"http://127.0.0.1:{port}/to/http://localhost:{port}/to//a.png", HERE) == DATA
    headers = {name.lower(): value for name, value in server.asked[0][1].items()}
    assert headers["accept-encoding"] == "identity" and headers["user-agent"].startswith("shardlm/")
    urls = [f"http://localhost:{port}/{name}" for name in ("a.png", "none")] * 20

    async def waiting():
        return files_here(urls, HERE)  # where an event loop runs, as in notebooks

    for found in (files_here(urls, HERE), asyncio.run(waiting())):
        assert found[::2] == [DATA] * 20 and all(isinstance(one, BadImage) for one in found[1::2])
    assert files_here([], HERE) == []


def test_nothing_is_read_of_private_networks(server, port):
    hosts = ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "127.1", "0", "0.0.0.0"]
    hosts += ["localhost.", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"]
    for host in hosts:
        with pytest.raises(BadImage, match=r"whose address is not public|could not be fetched|has four numbers"):
            fetch(f"http://{host}:{port}/a.png")
    with pytest.raises(BadImage, match=r"not fetched from 127.0.0.1, whose address is not public; allowed_media_dom"):
        fetch(f"http://127.0.0.1:{port}/a.png")
    assert not server.asked


PRIVATE = """10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 127.255.0.1 0.0.0.0 224.0.0.1 240.0.0.1
255.255.255.255 :: ::1 ::ffff:10.0.0.1 fe80::1 fe80::1%2 fc00::1 ff02::1 2002:a00:1:: 64:ff9b::a00:1 ::7f00:1 2001::1
2001:db8::1 64:ff9b:1::1 fec0::1"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_addresses_that_are_not_public(address):
    with pytest.raises(BadImage, match="not public"):
        media_http._check_public(address, "host")


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are(address):
    media_http._check_public(address, "host")


@pytest.mark.parametrize("host", ["2130706433", "127.1", "127.0.1", "0177.0.0.1", "127.0.0.01", "0", "127.0.0.1."])
def test_short_forms_of_addresses_are_refused_before_anything_is_asked(host):
    """By the library that connects only since aiohttp 3.14: before, each of these but the last reached this machine."""
    for rules in (NONE, MediaRules(("elsewhere",))):
        with pytest.raises(BadImage, match=r"an address has four numbers|only from elsewhere"):
            media_http._url(f"http://{host}:80/a.png", rules)


def test_a_name_is_looked_at_where_the_connection_is_made(server, port, monkeypatch):
    """Whatever it was before: a name may stand for another address each time."""
    answers = [("93.184.216.34", port), ("127.0.0.1", port)]

    def looked_up(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", answers.pop())]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    with pytest.raises(BadImage, match=r"not fetched from images.example, whose address is not public"):
        fetch(f"http://images.example:{port}/a.png")
    assert not server.asked and len(answers) == 1


def test_names_that_nobody_answers_for_take_no_thread_of_other_work(monkeypatch):
    """As of somebody who makes the system wait for each name."""
    answered = threading.Event()

    def looked_up(host, port, **_):
        answered.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    async def both():
        urls = [f"http://{number}.example/a.png" for number in range(40)]
        asked = [asyncio.ensure_future(file_at(url, MediaRules(media_seconds=0.5))) for url in urls]
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        await asyncio.to_thread(time.monotonic)
        took = time.monotonic() - begun
        found = await asyncio.gather(*asked, return_exceptions=True)
        answered.set()
        return took, found

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    took, found = asyncio.run(both())
    assert took < 0.3 and all("had not come after 0.5 seconds" in str(one) for one in found)


def test_redirections_are_looked_at_too(server, port):
    only = MediaRules(("localhost",), media_seconds=5)
    with pytest.raises(BadImage, match=r"not fetched from 127.0.0.1, only from localhost \(allowed_media_domains\)"):
        fetch(f"http://localhost:{port}/to/http://127.0.0.1:{port}/a.png", only)
    for to in ("file:///etc/passwd", "ftp://localhost/a", "data:image/png;base64,aGk="):
        with pytest.raises(BadImage, match="begins with https://HOST"):
            fetch(f"http://localhost:{port}/to/{to}", only)
    with pytest.raises(BadImage, match="came of 5 redirections"):
        fetch(f"http://localhost:{port}" + "/to/" * 7, only)
    assert ("/a.png", None) not in [(path, None) for path, _ in server.asked]


def test_sizes_and_times(server, port, monkeypatch):
    monkeypatch.setattr(media, "MAX_BYTES", 2**20)
    for path in ("large", "told"):
        with pytest.raises(BadImage, match=rf"/{path} has more than 1048576 bytes; send a smaller"):
            fetch(f"http://localhost:{port}/{path}", HERE)
    assert server.sent < 32 * 2**20
    with pytest.raises(BadImage, match=r"had not come after 0.3 seconds; send the image itself"):
        fetch(f"http://localhost:{port}/slow", MediaRules(HERE.allowed_media_domains, media_seconds=0.3))
    with pytest.raises(BadImage, match="was answered with status 404"):
        fetch(f"http://localhost:{port}/none", HERE)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(BadImage, match="could not be fetched: ClientConnectorError"):
            fetch(f"http://localhost:{nobody.getsockname()[1]}/a.png", HERE)
    for url in ("http://", "https:///a.png", "http://[::1", "http://localhost:99999/", "http://a b/"):
        with pytest.raises(BadImage):
            fetch(url, HERE)


def test_data_and_what_is_no_address():
    assert fetch(f"data:image/png;base64,{base64.b64encode(DATA).decode()}") == DATA
    for url in ("gopher://a/b", "a.png", "/etc/passwd", ""):
        with pytest.raises(BadImage, match="it begins with data:, https:, http: or file:"):
            fetch(url)


def test_files_below_a_folder_alone(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a b.png").write_bytes(DATA)
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    rules = MediaRules(allowed_local_media_path=str(folder))
    assert fetch((folder / "a b.png").as_uri(), rules) == DATA == fetch(f"file://localhost{folder}/a%20b.png", rules)
    for path in (tmp_path / "secret", folder / ".." / "secret", folder / "link"):
        with pytest.raises(BadImage, match="is not below the folder"):
            fetch(f"file://{path}", rules)
    with pytest.raises(BadImage, match="is not below the folder"):
        fetch(f"file://elsewhere{folder}/a%20b.png", rules)
    for path, words in (
        ("none", "No such file"),
        ("pipe", "is no file"),
        ("", "is no file"),
        ("%00", "cannot be read"),
    ):
        with pytest.raises(BadImage, match=words):
            fetch(f"file://{folder}/{path}", rules)
    with pytest.raises(BadImage, match="allowed_local_media_path names no folder"):
        fetch((folder / "a b.png").as_uri())


def test_files_have_a_size(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(DATA)
    monkeypatch.setattr(media, "MAX_BYTES", 100)
    with pytest.raises(BadImage, match="has more than 100 bytes"):
        fetch((tmp_path / "a").as_uri(), MediaRules(allowed_local_media_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"allowed_local_media_path": "/no/such"}, "allowed_local_media_path=/no/such is no folder"),
        ({"allowed_media_domains": ("https://a",)}, "allowed_media_domains has 'https://a'; give names of hosts"),
        ({"allowed_media_domains": ("",)}, "give names of hosts"),
        ({"media_seconds": 0}, "media_seconds=0 must be above 0"),
    ],
)
def test_rules_that_cannot_be(rules, words):
    with pytest.raises(ShardlmError, match=words):
        MediaRules(**rules)


def test_rules_as_users_write_them(tmp_path):
    assert MediaRules.of(None, None) == MediaRules.of([], "") == MediaRules()
    assert MediaRules.of(["a.b"], tmp_path) == MediaRules(("a.b",), str(tmp_path))
    with pytest.raises(ShardlmError, match=r"allowed_media_domains='a.b' is a text; give a list of hosts, \['a.b'\]"):
        MediaRules.of("a.b", "")
