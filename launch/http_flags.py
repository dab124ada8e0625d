"""Flags of the launchers that listen: where, https, keys, limits. Imports no jax."""

import os
from typing import Any

from absl import flags

from shardlm.serve.api.server import Listen

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 for all of the machine's.")
_PORT = flags.DEFINE_integer(
    "port", None, "Port to listen at, by default 8000, a router 8080; 0 takes a free one.", 0, 65535
)
_API_KEY = flags.DEFINE_list("api_key", [], "Keys, one of which clients must send. Also from SHARDLM_API_KEY.")
_ADMIN_KEY = flags.DEFINE_list(
    "admin_key", [], "Keys for new weights, of a router for its replicas. Also from SHARDLM_ADMIN_KEY. None: refused."
)
_CORS_ORIGINS = flags.DEFINE_list("cors_origins", [], "Origins whose web pages may call the server; * for all.")
_CERTIFICATE = flags.DEFINE_string("certificate", None, "For https: a file with the certificate chain, in PEM.")
_PRIVATE_KEY = flags.DEFINE_string("private_key", None, "For https: a file with its private key, in PEM.")
_MAX_BODY = flags.DEFINE_integer("max_body", 32 * 2**20, "Bytes of a request's body.", lower_bound=1)
_DRAIN_SECONDS = flags.DEFINE_float("drain_seconds", None, "After SIGTERM, end what is under way after so long.")
_ACCESS_LOG = flags.DEFINE_bool("access_log", False, "Log a line for each request.")


def listen(port: int) -> Listen:
    """Where to; `port` unless the command line says another."""
    return Listen(
        host=_HOST.value,
        port=port if _PORT.value is None else _PORT.value,
        certificate=_CERTIFICATE.value,
        private_key=_PRIVATE_KEY.value,
        access_log=_ACCESS_LOG.value,
        drain_seconds=_DRAIN_SECONDS.value,
    )


def http_settings() -> dict[str, Any]:
    """Fields of HttpSettings, from the command line, SHARDLM_API_KEY and SHARDLM_ADMIN_KEY."""
    return {
        "api_keys": (*_API_KEY.value, *_keys_of("SHARDLM_API_KEY")),
        "admin_keys": (*_ADMIN_KEY.value, *_keys_of("SHARDLM_ADMIN_KEY")),
        "cors_origins": tuple(_CORS_ORIGINS.value),
        "max_body": _MAX_BODY.value,
    }


def _keys_of(variable: str) -> tuple[str, ...]:
    """Keys that an environment variable holds, with commas between them."""
    return tuple(key for key in os.environ.get(variable, "").split(",") if key)
