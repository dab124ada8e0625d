"""Applications that listen, in threads, and what is sent to them without a client."""

import contextlib
import json
import signal
import subprocess
import threading
import time

from shardlm.serve.api.app import make_app
from shardlm.serve.api.server import Listen, Server, listening
from shardlm.serve.api.settings import Settings


@contextlib.contextmanager
def listens(app, *, listen=None, write_seconds=60):
    """(the server, its address)."""
    listen = listen or Listen(port=0)
    with listening(listen, write_seconds) as sock:
        server = Server(app, listen)
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            if not server.should_exit:
                server.handle_exit(signal.SIGTERM, None)
            thread.join(60)
            assert not thread.is_alive()


def serving(llm, *, listen=None, **settings):
    """(the server, its address), in a thread."""
    settings = Settings(**settings)
    return listens(make_app(llm, settings), listen=listen, write_seconds=settings.write_seconds)


def post(sock, body, key="-", version=b"1.1", more=b""):
    """A request without a client that would read its answer."""
    body = json.dumps(body).encode()
    head = f"host: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n".encode()
    sock.sendall(b"POST /v1/completions HTTP/" + version + b"\r\n" + head + more + b"\r\n" + body)


def until(condition):
    end = time.monotonic() + 60  # of a busy machine
    while not condition():
        assert time.monotonic() < end, "it did not come to that in a minute"
        time.sleep(0.01)


def made_certificate(folder):
    """(certificate, private key) of 127.0.0.1, files that openssl makes."""
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key
