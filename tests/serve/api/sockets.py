"""Applications that listen, in threads."""

import contextlib
import signal
import subprocess
import threading
import time

from shardlm.serve.api.server import Listen, Server, listening


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
