"""Images over the network. Each address that a name stands for is looked at where the connection is made, so that it
cannot be another one by then, and each that an answer redirects to again."""

import asyncio
import concurrent.futures
import contextlib
import functools
import ipaddress
import socket

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

import shardlm
from shardlm.serve.media import SHOWN, MediaRules, too_large
from shardlm.vision.read import BadImage

REDIRECTS = 5
_MOVED = (301, 302, 303, 307, 308)
# Ways to write an address of IPv4 in one of IPv6 (6to4, NAT64), which Python has for public.
_EMBEDDING = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("64:ff9b::/96"))
# Bodies come as they are: one that is unpacked could be of any size.
_HEADERS = {"user-agent": f"shardlm/{shardlm.__version__}", "accept": "image/*, video/*", "accept-encoding": "identity"}


async def fetched(address: str, rules: MediaRules, most: int) -> bytes:
    """A file of at most so many bytes. Raises BadImage."""
    try:
        async with asyncio.timeout(rules.media_seconds):
            return await _fetched(_url(address, rules), rules, most)
    except TimeoutError:
        message = f"{address[:SHOWN]} had not come after {rules.media_seconds:g} seconds; send the image itself"
        raise BadImage(message) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise BadImage(f"{address[:SHOWN]} could not be fetched: {type(error).__name__}: {error!s:.200}") from None


async def _fetched(url: yarl.URL, rules: MediaRules, most: int) -> bytes:
    resolver = _Resolver(rules)
    connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False)
    options = {"cookie_jar": aiohttp.DummyCookieJar(), "auto_decompress": False, "headers": _HEADERS}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(resolver.close)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, **options))
        for _ in range(REDIRECTS + 1):
            async with session.get(url, allow_redirects=False) as answer:
                if answer.status in _MOVED and (to := answer.headers.get("location")):
                    url = _url(str(url.join(yarl.URL(to))), rules)
                    continue
                if answer.status != 200:
                    raise BadImage(f"{str(url)[:SHOWN]} was answered with status {answer.status}")
                return await _body(answer, str(url), most)
    raise BadImage(f"{str(url)[:SHOWN]} came of {REDIRECTS} redirections and leads to another one")


async def _body(answer: aiohttp.ClientResponse, url: str, most: int) -> bytes:
    if (answer.content_length or 0) > most:
        raise too_large(url, most)
    parts, length = [], 0
    async for part in answer.content.iter_any():
        parts.append(part)
        length += len(part)
        if length > most:
            raise too_large(url, most)
    return b"".join(parts)


def _url(address: str, rules: MediaRules) -> yarl.URL:
    """Raises BadImage for what is not fetched, ValueError for what is no address."""
    url = yarl.URL(address)
    if url.scheme not in ("http", "https") or not url.host:
        raise BadImage(f"an image's address is {address[:SHOWN]!r}; it begins with https://HOST or http://HOST")
    if rules.allowed_media_domains and url.host not in map(str.lower, rules.allowed_media_domains):
        names = ", ".join(rules.allowed_media_domains)
        raise BadImage(f"images are not fetched from {url.host:.100}, only from {names} (allowed_media_domains)")
    if not rules.allowed_media_domains:
        _check_written(url.host)
    return url


def _check_written(host: str) -> None:
    """Raises BadImage for an address that is not public, and for one in a short form (127.1, 2130706433): aiohttp
    before 3.14 gives every text of digits and dots to the system, which knows them, without asking the resolver."""
    if _is_address(host):
        _check_public(host, host)
    elif host.replace(".", "").isdigit():
        raise BadImage(f"images are not fetched from {host:.100}: an address has four numbers up to 255")


class _Resolver(AbstractResolver):
    """Of names, which must stand for public addresses unless they are allowed by name. The system may take half a
    minute over a name, in a thread that nothing ends: it is one of its own, as the event loop's few do other work."""

    def __init__(self, rules: MediaRules):
        self._rules, self._thread = rules, concurrent.futures.ThreadPoolExecutor(1, "names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        kinds = {"family": family, "type": socket.SOCK_STREAM, "flags": socket.AI_ADDRCONFIG}
        ask = functools.partial(socket.getaddrinfo, host, port, **kinds)
        found = await asyncio.get_running_loop().run_in_executor(self._thread, ask)
        if not self._rules.allowed_media_domains:
            for *_, address in found:
                _check_public(address[0], host)
        return [_result(host, *one) for one in found]

    async def close(self) -> None:
        self._thread.shutdown(wait=False)


def _result(host: str, family: int, kind: int, proto: int, name: str, address: tuple) -> ResolveResult:
    """What `socket.getaddrinfo` gives, as aiohttp has it."""
    scope = f"%{address[3]}" if family == socket.AF_INET6 and address[3] else ""  # of an address of one link
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(
        hostname=host, host=address[0] + scope, port=address[1], family=family, proto=proto, flags=numeric
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_public(address: str, host: str) -> None:
    """Raises BadImage for an address that is not everybody's, such as this machine's or its network's."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    private = not found.is_global or found.is_reserved or found.is_multicast or getattr(found, "is_site_local", False)
    if private or any(found in network for network in _EMBEDDING if network.version == found.version):
        raise BadImage(
            f"images are not fetched from {host:.100}, whose address is not public; allowed_media_domains can allow it"
        )
