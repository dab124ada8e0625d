"""A headless Chromium, spoken to over its own pipe (https://chromedevtools.github.io/devtools-protocol/): no driver and
no websocket library is needed, only the browser."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time

NAMES = ("chromium", "chromium-headless-shell", "google-chrome", "chrome-headless-shell")
# One process: containers often lack what Chromium's sandbox and its helpers ask for.
FLAGS = ("--headless", "--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu", "--disable-dev-shm-usage")


def find() -> str | None:
    """The path in SHARDLM_CHROMIUM, else a browser that is installed."""
    return os.environ.get("SHARDLM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `errors`: what its console said that is an error, and exceptions. `asked`: the addresses it wanted."""

    def __init__(self, requests: int, replies: int):
        self._requests, self._replies = requests, replies
        self._held, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        self.asked: list[str] = []
        self._loaded: set[str] = set()  # loaderId of each document that is there whole
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **params):
        """The result of one command; what the page tells meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (told := self._read()).get("id") != self._number:
            self._note(told)
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    def open(self, url: str) -> None:
        """The page at `url`, all of it: Page.navigate is answered before the document has its elements."""
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, f"{url}: {found['errorText']}"
        while found["loaderId"] not in self._loaded:
            self._note(self._read())

    def _read(self):
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._replies], [], [], 60)
            assert ready, "the browser says nothing for a minute"
            part = os.read(self._replies, 2**16)
            assert part, "the browser has ended"
            self._held += part
        message, self._held = self._held.split(b"\0", 1)
        return json.loads(message)

    def _note(self, told) -> None:
        params = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif told.get("method") == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif told.get("method") == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])
        elif told.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif told.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"]))

    def value(self, expression: str):
        """Of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 60):
        """The expression's value as soon as it is true."""
        end = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"{expression} is still {found!r}"
            time.sleep(0.02)
        return found

    def type(self, id: str, text: str) -> None:
        self.value(f"document.getElementById({id!r}).focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)


@contextlib.contextmanager
def browser(binary: str, folder):
    """A Page in a browser whose profile is in `folder`."""
    (their_in, requests), (replies, their_out) = os.pipe(), os.pipe()
    ours = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (their_in, their_out)]  # none of them is 3 or 4
    command = [binary, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(ours, (3, 4), strict=True)]
    actions += [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    process = os.posix_spawnp(binary, command, os.environ, file_actions=actions)
    for fd in (their_in, their_out, *ours):
        os.close(fd)
    try:
        yield Page(requests, replies)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(requests)
        os.close(replies)
