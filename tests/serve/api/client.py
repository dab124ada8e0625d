"""A client in the process of the application: no sockets."""

import asyncio
import json

import httpx2
from fake_llm import FakeLLM

from shardlm.serve.api.app import make_app
from shardlm.serve.api.settings import Settings


class Client:
    """`post` and `get` run the application in an event loop of their own."""

    def __init__(self, llm=None, **settings):
        self.llm = llm or FakeLLM()
        self.app = make_app(self.llm, Settings(**settings))
        self.service = self.app.state.service

    def post(self, path, body=None, *, raw=None, headers=None):
        content = json.dumps(body) if raw is None else raw
        return asyncio.run(self.send("POST", path, content, headers))

    def get(self, path, headers=None):
        return asyncio.run(self.send("GET", path, None, headers))

    async def send(self, method, path, content, headers=None):
        transport = httpx2.ASGITransport(app=self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, content=content, headers=headers)

    def events(self, path, body):
        """The values of a stream that ends as it must."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event[6:]) for event in events]


def error(response, status):
    """The error of a response, in OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    return body["error"]
