"""Where images and videos may come from that are sent by their address, and those that lie in a folder of this machine.
What comes over the network is media_http.py's. No jax."""

import asyncio
import concurrent.futures
import dataclasses
import os
import pathlib
import stat
import urllib.parse
import urllib.request
from collections.abc import Sequence

from shardlm.errors import ShardlmError
from shardlm.vision.read import MAX_BYTES, BadImage, file_of
from shardlm.vision.video_files import MAX_BYTES as MAX_VIDEO

SHOWN = 120  # characters of an address in messages
AT_ONCE = 16  # images that one call in Python fetches


@dataclasses.dataclass(frozen=True)
class MediaRules:
    """Names are vLLM's where it has them.

    allowed_media_domains     hosts that images are fetched from, in whatever network they are; (): any with a public
                              address, so that nobody reads through this machine what it alone can reach
    allowed_local_media_path  a folder, below which file: addresses are read; "": none are
    media_seconds             in which an image must have come
    """

    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str = ""
    media_seconds: float = 10

    @classmethod
    def of(cls, domains: Sequence[str] | None, path: str | os.PathLike | None) -> "MediaRules":
        """As users write them. Raises ShardlmError for a text, of which each letter would be a host."""
        if isinstance(domains, str):
            raise ShardlmError(f"allowed_media_domains={domains!r} is a text; give a list of hosts, [{domains!r}]")
        return cls(tuple(domains or ()), os.fspath(path or ""))

    def __post_init__(self):
        if self.allowed_local_media_path and not pathlib.Path(self.allowed_local_media_path).is_dir():
            raise ShardlmError(f"allowed_local_media_path={self.allowed_local_media_path} is no folder; give one")
        for domain in self.allowed_media_domains:
            if not domain or "/" in domain or ":" in domain:
                raise ShardlmError(f"allowed_media_domains has {domain!r}; give names of hosts, such as example.com")
        if self.media_seconds <= 0:
            raise ShardlmError(f"media_seconds={self.media_seconds} must be above 0")


async def file_at(url: str, rules: MediaRules, video: bool = False) -> bytes | str:
    """The bytes of an image, or of a `video`, from data:, file:, http: or https:; a video's address with data: as it
    is. Raises BadImage for what is not allowed, not there, or too large."""
    scheme, most = url.partition(":")[0].lower(), MAX_VIDEO if video else MAX_BYTES
    if scheme == "data":
        return url if video else await asyncio.to_thread(file_of, url)
    if scheme == "file":
        return await asyncio.to_thread(_local, url, rules, most)
    if scheme in ("http", "https"):
        return await _http(url, rules, most)
    kind = "a video" if video else "an image"
    raise BadImage(f"{kind}'s address is {url[:SHOWN]!r}; it begins with data:, https:, http: or file:")


def files_here(urls: Sequence[str], rules: MediaRules, videos: Sequence[bool] = ()) -> list[bytes | str | BadImage]:
    """As `file_at`, of several, or what it would raise; beside an event loop that the caller may be in. `videos`: which
    of them are."""
    with concurrent.futures.ThreadPoolExecutor(min(AT_ONCE, max(1, len(urls)))) as threads:
        kinds = videos or [False] * len(urls)
        return list(threads.map(lambda url, video: _file_or_error(url, rules, video), urls, kinds))


def _file_or_error(url: str, rules: MediaRules, video: bool) -> bytes | str | BadImage:
    try:
        return asyncio.run(file_at(url, rules, video))
    except BadImage as error:
        return error


async def _http(url: str, rules: MediaRules, most: int) -> bytes:
    try:
        from shardlm.serve.media_http import fetched  # what it needs comes with shardlm[serve]
    except ModuleNotFoundError as error:
        raise BadImage(
            f"images are fetched by {error.name}, which is not installed: pip install 'shardlm[serve]', or give images "
            "themselves"
        ) from None
    return await fetched(url, rules, most)


def _local(url: str, rules: MediaRules, most: int) -> bytes:
    if not rules.allowed_local_media_path:
        raise BadImage("images of this machine (file:) are not read: allowed_local_media_path names no folder for them")
    parts, folder = urllib.parse.urlsplit(url), pathlib.Path(rules.allowed_local_media_path).resolve()
    try:
        path = pathlib.Path(urllib.request.url2pathname(parts.path)).resolve()
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(folder):
            raise BadImage(f"{url[:SHOWN]} is not below the folder that images are read from (file:///...)")
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise BadImage(f"{url[:SHOWN]} is no file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadImage(f"{url[:SHOWN]} cannot be read: {why}") from None
    if len(data) > most:
        raise too_large(url, most)
    return data


def too_large(url: str, most: int) -> BadImage:
    return BadImage(f"{url[:SHOWN]} has more than {most} bytes; send a smaller image")
