"""Serves a model over OpenAI's HTTP API: the server's part of the command line. Imports no jax.

A key is better given as SHARDLM_API_KEY than on the command line, which others on the machine can read.
"""

import os

from absl import flags

from shardlm.serve.api.server import Listen, run
from shardlm.serve.api.settings import Settings

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 for all of the machine's.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen at; 0 takes a free one.", lower_bound=0, upper_bound=65535)
_MODEL_NAMES = flags.DEFINE_list("model_names", [], "What clients may call the model; the first is the usual one.")
_API_KEY = flags.DEFINE_list("api_key", [], "Keys, one of which clients must send. Also from SHARDLM_API_KEY.")
_CORS_ORIGINS = flags.DEFINE_list("cors_origins", [], "Origins whose web pages may call the server; * for all.")
_CERTIFICATE = flags.DEFINE_string("certificate", None, "For https: a file with the certificate chain, in PEM.")
_PRIVATE_KEY = flags.DEFINE_string("private_key", None, "For https: a file with its private key, in PEM.")
_TOOL_STYLE = flags.DEFINE_enum(
    "tool_style", "auto", ["auto", "hermes", "llama"], "How the model writes calls of tools; auto: see its template."
)
_MAX_QUEUE = flags.DEFINE_integer("max_queue", 1024, "Requests that may wait for their first token.", lower_bound=1)
_MAX_BODY = flags.DEFINE_integer("max_body", 32 * 2**20, "Bytes of a request's body.", lower_bound=1)
_REQUEST_SECONDS = flags.DEFINE_float("request_seconds", None, "End a request after so long.")
_DRAIN_SECONDS = flags.DEFINE_float("drain_seconds", None, "After SIGTERM, end what is under way after so long.")
_ACCESS_LOG = flags.DEFINE_bool("access_log", False, "Log a line for each request.")


def settings() -> Settings:
    """What the command line and SHARDLM_API_KEY say."""
    from_environment = [key for key in os.environ.get("SHARDLM_API_KEY", "").split(",") if key]
    return Settings(
        model_names=tuple(_MODEL_NAMES.value),
        api_keys=(*_API_KEY.value, *from_environment),
        cors_origins=tuple(_CORS_ORIGINS.value),
        tool_style=_TOOL_STYLE.value,
        max_body=_MAX_BODY.value,
        max_queue=_MAX_QUEUE.value,
        request_seconds=_REQUEST_SECONDS.value,
    )


def serve(llm) -> None:
    """Serves an AsyncLLM as the command line says, until SIGTERM or Ctrl-C. Raises ShardlmError for what cannot be."""
    listen = Listen(
        host=_HOST.value,
        port=_PORT.value,
        certificate=_CERTIFICATE.value,
        private_key=_PRIVATE_KEY.value,
        access_log=_ACCESS_LOG.value,
        drain_seconds=_DRAIN_SECONDS.value,
    )
    run(llm, settings(), listen)
