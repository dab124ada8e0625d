"""Images over the network. Each address that a name stands for is looked at where the connection is made, so that it
cannot be another one by then, and each that an answer redirects to again."""

import asyncio
import ipaddress
import socket

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

import shardlm
from shardlm.serve.media import SHOWN, MediaRules, too_large
from shardlm.vision.read import MAX_BYTES, BadImage

REDIRECTS = 5
_MOVED = (301, 302, 303, 307, 308)
# Ways to write an address of IPv4 in one of IPv6 (6to4, NAT64), which Python has for public.
_EMBEDDING = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("64:ff9b::/96"))
# Bodies come as they are: one that is unpacked could be of any size.
_HEADERS = {"user-agent": f"shardlm/{shardlm.__version__}", "accept": "image/*", "accept-encoding": "identity"}


async def fetched(address: str, rules: MediaRules) -> bytes:
    """Raises BadImage."""
    try:
        async with asyncio.timeout(rules.media_seconds):
            return await _fetched(_url(address, rules), rules)
    except TimeoutError:
        message = f"{address[:SHOWN]} had not come after {rules.media_seconds:g} seconds; send the image itself"
        raise BadImage(message) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise BadImage(f"{address[:SHOWN]} could not be fetched: {type(error).__name__}: {error!s:.200}") from None


async def _fetched(url: yarl.URL, rules: MediaRules) -> bytes:
    connector = aiohttp.TCPConnector(resolver=_Resolver(rules), use_dns_cache=False)
    options = {"cookie_jar": aiohttp.DummyCookieJar(), "auto_decompress": False, "headers": _HEADERS}
    async with aiohttp.ClientSession(connector=connector, **options) as session:
        for _ in range(REDIRECTS + 1):
            async with session.get(url, allow_redirects=False) as answer:
                if answer.status in _MOVED and (to := answer.headers.get("location")):
                    url = _url(str(url.join(yarl.URL(to))), rules)
                    continue
                if answer.status != 200:
                    raise BadImage(f"{str(url)[:SHOWN]} was answered with status {answer.status}")
                return await _body(answer, str(url))
    raise BadImage(f"{str(url)[:SHOWN]} came of {REDIRECTS} redirections and leads to another one")


async def _body(answer: aiohttp.ClientResponse, url: str) -> bytes:
    if (answer.content_length or 0) > MAX_BYTES:
        raise too_large(url)
    parts, length = [], 0
    async for part in answer.content.iter_any():
        parts.append(part)
        length += len(part)
        if length > MAX_BYTES:
            raise too_large(url)
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
    """Of names, which must stand for public addresses unless they are allowed by name."""

    def __init__(self, rules: MediaRules):
        self._rules, self._names = rules, ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._names.resolve(host, port, family)
        if not self._rules.allowed_media_domains:
            for one in found:
                _check_public(one["host"], host)
        return found

    async def close(self) -> None:
        await self._names.close()


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
    private = not found.is_global or found.is_reserved or found.is_multicast
    if private or any(found in network for network in _EMBEDDING if network.version == found.version):
        raise BadImage(
            f"images are not fetched from {host:.100}, whose address is not public; allowed_media_domains can allow it"
        )
