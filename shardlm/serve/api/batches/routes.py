"""/v1/files and /v1/batches, OpenAI's, for files of requests alone."""

import asyncio
import email.parser
import email.policy
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from shardlm.serve.api.batches.service import Batches
from shardlm.serve.api.batches.store import OPEN, Record
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.http import Gone, json_response, read_body
from shardlm.serve.api.protocol import parse

FILE_BYTES = 200 * 2**20  # of a file, as OpenAI's
UPLOAD_SECONDS = 600.0
PAGE = 100  # entries of a list, at most


class BatchRequest(msgspec.Struct, kw_only=True):
    """What begins a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


def routes(batches: Batches) -> list[BaseRoute]:
    own = _Routes(batches)
    return [
        Route("/v1/files", own.upload, methods=["POST"]),
        Route("/v1/files", own.files),
        Route("/v1/files/{id}", own.file),
        Route("/v1/files/{id}", own.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", own.content),
        Route("/v1/batches", own.create, methods=["POST"]),
        Route("/v1/batches", own.list),
        Route("/v1/batches/{id}", own.batch),
        Route("/v1/batches/{id}/cancel", own.cancel, methods=["POST"]),
    ]


class _Routes:
    def __init__(self, batches: Batches):
        self._batches, self._store = batches, batches.store
        self._uploads = asyncio.Semaphore(2)  # each lies in memory, twice

    async def upload(self, request: Request) -> Response:
        self._batches.service.check_open()
        self._store.check_room()
        async with self._uploads:
            body = await _body(request, FILE_BYTES + 2**16, UPLOAD_SECONDS)
            fields = await asyncio.to_thread(form, body, request.headers.get("content-type", ""))
            purpose, (name, content) = fields.get("purpose", ("", b""))[1], fields.get("file", ("", None))
            if purpose != b"batch":
                raise ApiError('purpose must be "batch": this server keeps no other files', param="purpose")
            if not content:
                raise ApiError("file is missing, or empty", param="file")
            return json_response(await asyncio.to_thread(self._store.add, name or "batch.jsonl", content))

    async def files(self, request: Request) -> Response:
        return _listed(list(self._store.files.values()), request)

    async def file(self, request: Request) -> Response:
        return json_response(self._store.file(request.path_params["id"]))

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._store.delete(id)
        return json_response({"id": id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        id = self._store.file(request.path_params["id"])["id"]
        return FileResponse(self._store.content(id), media_type="application/jsonl")

    async def create(self, request: Request) -> Response:
        service = self._batches.service
        service.check_open()
        body = await _body(request, 2**16, service.settings.read_seconds)
        wanted, ignored = parse(body, BatchRequest)
        service.metrics.ignored_fields += ignored
        if wanted.endpoint not in self._batches.handlers:
            message = f"endpoint={wanted.endpoint!r:.100} must be one of {', '.join(self._batches.handlers)}"
            raise ApiError(message, param="endpoint")
        if self._store.file(wanted.input_file_id)["purpose"] != "batch":
            raise ApiError(f"the file {wanted.input_file_id} has answers, no requests", param="input_file_id")
        asked = wanted.endpoint, wanted.input_file_id, wanted.completion_window, wanted.metadata
        batch = self._store.begin(*asked)
        self._batches.wake.set()
        return json_response(batch)

    async def list(self, request: Request) -> Response:
        return _listed(list(self._store.batches.values()), request)

    async def batch(self, request: Request) -> Response:
        return json_response(self._store.batch(request.path_params["id"]))

    async def cancel(self, request: Request) -> Response:
        batch = self._store.batch(request.path_params["id"])
        if batch["status"] not in OPEN:
            raise ApiError(f"the batch {batch['id']} is {batch['status']} and cannot be cancelled", 409)
        if batch["status"] != "cancelling":
            self._batches.cancel(batch)
        return json_response(batch)


async def _body(request: Request, most: int, seconds: float) -> bytes:
    """Raises ApiError as `read_body` does."""
    try:
        return await read_body(request.scope, request.receive, most, seconds)
    except Gone:
        raise ApiError("the client has gone") from None


def _listed(found: list[Record], request: Request) -> Response:
    """A page, the newest first but by order=asc: of `limit` entries, those that follow `after`. Raises ApiError."""
    asked = request.query_params
    limit, order = asked.get("limit", "20"), asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(f"order={order:.50} must be asc or desc", param="order")
    found = found if order == "asc" else found[::-1]
    if not limit.isdecimal() or len(limit) > 18 or int(limit) < 1:
        raise ApiError(f"limit={limit:.50} must be a number from 1", param="limit")
    if purpose := asked.get("purpose"):
        found = [one for one in found if one.get("purpose") == purpose]
    if after := asked.get("after"):
        ids = [one["id"] for one in found]
        if after not in ids:
            raise ApiError(f"after={after:.100} is not in this list", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[: min(int(limit), PAGE)]
    ids = [one["id"] for one in page] or [None]
    more: dict[str, Any] = {"has_more": len(found) > len(page), "first_id": ids[0], "last_id": ids[-1]}
    return json_response({"object": "list", "data": page, **more})


def form(body: bytes, content_type: str) -> dict[str, tuple[str, bytes]]:
    """{name of a field: (of a file its name, what it holds)} of a body in multipart/form-data
    (https://www.rfc-editor.org/rfc/rfc7578). Raises ApiError for what is none."""
    headers = email.parser.HeaderParser(policy=email.policy.HTTP)
    boundary = headers.parsestr(f"content-type: {content_type}\r\n\r\n").get_param("boundary", "")
    if not content_type.lower().startswith("multipart/form-data") or not isinstance(boundary, str) or not boundary:
        raise ApiError("a file is sent as multipart/form-data, with its boundary", 415)
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if not parts or not parts[-1].startswith(b"--"):
        raise ApiError("the form has no end: it is not whole")
    fields = {}
    for part in parts[:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        about = headers.parsestr(head.decode("utf-8", "replace").lstrip("\r\n") + "\r\n\r\n")
        name = about.get_param("name", "", "content-disposition")
        fields[str(name)] = about.get_filename() or "", content
    return fields
