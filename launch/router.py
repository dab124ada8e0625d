"""Routes OpenAI's HTTP API to several servers (launch.serve): to the one that knows a prompt's beginning, else the
least loaded; around those that fail.

python -m launch.router --replica=http://a:8000 --replica=http://b:8000 --port=8080
python -m launch.router --replica_dns=replicas.default.svc:8000 --host=0.0.0.0

Keys are better given as SHARDLM_API_KEY (of clients), SHARDLM_ADMIN_KEY (to drain, add and remove servers at /admin)
and SHARDLM_REPLICA_KEY (to ask the servers for their models) than on the command line.
"""

import os
import sys

from absl import flags

from launch.flags import run as run_main

try:
    from launch.http_flags import http_settings, listen
    from shardlm.serve.api.server import run_app
    from shardlm.serve.router.app import make_app
    from shardlm.serve.router.settings import RouterSettings
except ModuleNotFoundError as error:
    sys.exit(f"error: routing needs {error.name}; pip install 'shardlm[serve]'")

_REPLICA = flags.DEFINE_multi_string("replica", [], "Address of a server; once for each.")
_REPLICA_DNS = flags.DEFINE_multi_string("replica_dns", [], "NAME:PORT; all addresses of the name are servers.")
_REPLICA_KEY = flags.DEFINE_string("replica_key", "", "Key of the servers. Also from SHARDLM_REPLICA_KEY.")
_REPLICA_CA = flags.DEFINE_string("replica_ca", "", "For https servers: a file with who signs for them, in PEM.")
_POLL = flags.DEFINE_float("poll_seconds", 1, "Between two looks at a server.")
_TIMEOUT = flags.DEFINE_float("timeout_seconds", 2, "For a connection to a server, and for a look at it.")
_RETRIES = flags.DEFINE_integer("max_retries", 3, "Further servers for a request that has produced nothing.")
_THRESHOLD = flags.DEFINE_float("balance_threshold", 16, "Requests by which a server may be busier for a prefix.")
_MATCH = flags.DEFINE_float("least_match", 0.5, "Share of a prompt that a server must know to be preferred.")


def settings() -> RouterSettings:
    """What the command line and the environment say."""
    return RouterSettings(
        **http_settings(),
        replicas=tuple(_REPLICA.value),
        replica_dns=tuple(_REPLICA_DNS.value),
        replica_key=_REPLICA_KEY.value or os.environ.get("SHARDLM_REPLICA_KEY", ""),
        replica_ca=_REPLICA_CA.value,
        poll_seconds=_POLL.value,
        timeout_seconds=_TIMEOUT.value,
        max_retries=_RETRIES.value,
        balance_threshold=_THRESHOLD.value,
        least_match=_MATCH.value,
    )


def main() -> int:
    chosen = settings()
    run_app(make_app(chosen), chosen, listen(8080))
    return 0


if __name__ == "__main__":
    run_main(main, needs_config=False)
