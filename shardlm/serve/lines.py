"""Connections between the processes of one engine. Who leads listens, and says where by a key of jax's coordinator,
with a secret that both ends prove to know; what followers get is unpickled, what the leader gets of them is text."""

import hashlib
import hmac
import itertools
import json
import logging
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

import jax

from shardlm.distributed import coordinator, coordinator_host
from shardlm.errors import ShardlmError
from shardlm.serve.followers import Line

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0  # that the leader gives a connection, while the others wait for their turn
TURN_SECONDS = 600.0
WAIT_MS = 600_000  # of one call to the coordinator; then it is called again
SECRET = 32  # bytes
SHOWN = 300  # characters of what differs
LEADER, FOLLOWER = b"leads", b"follows"

_NAME = "shardlm/engine"
_asked, _engines = itertools.count(), itertools.count()  # every process makes the same ones, in the same order


def agree(about: Mapping[str, str], process: int) -> None:
    """Before an engine is built. Raises ShardlmError in a process where it is to be another one than in the first."""
    name, client = f"{_NAME}/asked/{next(_asked)}", coordinator()
    if process == 0:
        client.key_value_set(name, json.dumps(dict(about)))
    elif wrong := _difference(json.loads(_awaited(client, name)), about, process):
        raise ShardlmError(wrong)


def to_followers(about: Mapping[str, str], processes: int) -> list[Line]:
    """A line to each other process of so many, in their order. `about`: what must be the same there. Raises
    ShardlmError where it is not."""
    key, client = secrets.token_bytes(SECRET), coordinator()
    found: dict[int, Connection] = {}
    with _listening() as listener:
        place = json.dumps({"port": listener.getsockname()[1], "key": key.hex()})
        client.key_value_set(_name(), place)
        for sock in _known(listener, key):
            line = _connection(sock)
            said = json.loads(line.recv_bytes())
            wrong = _difference(about, said["about"], said["process"])
            line.send_bytes(wrong.encode())
            if wrong:
                raise ShardlmError(wrong)
            found[said["process"]] = line
            if len(found) == processes - 1:
                break
    return [Line(process, found[process]) for process in sorted(found)]


def to_leader(about: Mapping[str, str], process: int) -> Connection:
    """Of the process of this number. Raises ShardlmError where the leader's engine is another one."""
    place = json.loads(_awaited(coordinator(), _name()))  # its programs may take longer to compile
    sock = socket.create_connection((coordinator_host(), place["port"]), timeout=TURN_SECONDS)
    if not _proved(sock, bytes.fromhex(place["key"]), FOLLOWER, LEADER, TURN_SECONDS):
        raise ShardlmError(f"what answers at {coordinator_host()} port {place['port']} is not process 0 of this job")
    line = _connection(sock)
    line.send_bytes(json.dumps({"process": process, "about": dict(about)}).encode())
    if wrong := line.recv_bytes().decode():
        raise ShardlmError(wrong)
    return line


def _known(listener: socket.socket, key: bytes) -> Iterator[socket.socket]:
    """Who connects and knows the key."""
    while True:
        sock, address = listener.accept()
        try:
            known = _proved(sock, key, LEADER, FOLLOWER, HANDSHAKE_SECONDS)
        except OSError:
            known = False
        if known:
            yield sock
        else:
            log.warning("a connection from %s is not of this job", address[0])
            sock.close()


def _proved(sock: socket.socket, key: bytes, here: bytes, there: bytes, seconds: float) -> bool:
    """Whether the other end knows the key; it is shown that this one does. What an end says holds for its side alone,
    so that nobody's answer can be sent back as one's own. Raises OSError where it does not say all in so long."""
    own, end = secrets.token_bytes(SECRET), time.monotonic() + seconds
    sock.settimeout(seconds)
    sock.sendall(own)
    sock.sendall(hmac.digest(key, here + _received(sock, end), hashlib.sha256))
    return hmac.compare_digest(_received(sock, end), hmac.digest(key, there + own, hashlib.sha256))


def _received(sock: socket.socket, end: float) -> bytes:
    said = b""
    while len(said) < SECRET:
        sock.settimeout(max(0.001, end - time.monotonic()))
        if not (more := sock.recv(SECRET - len(said))):
            raise ConnectionError("closed")
        said += more
    return said


def _connection(sock: socket.socket) -> Connection:
    """Messages of any length; each leaves at once, as a step is a few of some hundred bytes."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(sock.detach())


def _listening() -> socket.socket:
    """On a free port, for the other hosts."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _name() -> str:
    return f"{_NAME}/{next(_engines)}"


def _awaited(client, name: str) -> str:
    """What the coordinator has by this name, once it has it."""
    while True:
        try:
            return client.blocking_key_value_get(name, WAIT_MS)
        except jax.errors.JaxRuntimeError as error:  # jaxlib tells them apart by their text
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _difference(ours: Mapping[str, str], theirs: Mapping[str, str], process: int) -> str:
    for name, own in ours.items():
        other = theirs.get(name, "")
        if own != other:
            same = sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(own, other, strict=False)))
            start = max(0, same - SHOWN // 4)
            here, there = (said[start : start + SHOWN] for said in (own, other))
            return (
                f"process {process} has another engine than process 0: {name} is {there}, and {here} in process 0; "
                "start all of them with the same options and the same model"
            )
    return ""
