"""Applications that listen, in threads."""

import contextlib
import signal
import threading
import time

from shardlm.serve.api.server import Listen, Server, listening


@contextlib.contextmanager
def listens(app, *, listen=None, write_seconds=60):
    """(the server, its address)."""
    listen = listen or Listen(port=0)
    with listening(listen, write_seconds) as sock:
        server = Server(app, listen)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            if not server.should_exit:
                server.handle_exit(signal.SIGTERM, None)
            thread.join(10)
            assert not thread.is_alive()


def until(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that in five seconds")
