"""What whoever runs the router decides."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.serve.api.settings import HttpSettings, above_zero


@dataclasses.dataclass(frozen=True)
class RouterSettings(HttpSettings):
    """
    replicas           addresses of servers
    replica_dns        NAME:PORT each; every address the name has is a replica, looked up at every poll
    replica_key        that the router asks the replicas' /v1/models with; "": the first of api_keys
    replica_ca         a file with the authorities that sign the replicas' certificates, in PEM; "": the system's
    poll_seconds       between two looks at a replica
    timeout_seconds    a replica has missed a look where nothing comes for so long; connecting may take as long
    max_retries        further replicas that are tried for a request that has produced nothing
    balance_threshold  requests by which a replica that has a prompt's beginning may be busier than the least loaded
    least_match        share of a prompt that must be there for its beginning to decide
    """

    replicas: tuple[str, ...] = ()
    replica_dns: tuple[str, ...] = ()
    replica_key: str = ""
    replica_ca: str = ""
    poll_seconds: float = 1
    timeout_seconds: float = 2
    max_retries: int = 3
    balance_threshold: float = 16
    least_match: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "poll_seconds", "timeout_seconds")
        if not (self.replicas or self.replica_dns or self.admin_keys):
            raise ShardlmError(
                "the router has no replicas and no way to get any; give --replica=URL for each, "
                "--replica_dns=NAME:PORT, or an admin key to add them later"
            )
        if not 0 <= self.least_match <= 1:
            raise ShardlmError(f"least_match={self.least_match} is a share; it must be between 0 and 1")
        if self.max_retries < 0 or self.balance_threshold < 0:
            raise ShardlmError(
                f"max_retries={self.max_retries} and balance_threshold={self.balance_threshold} must be at least 0"
            )
        for name in self.replica_dns:
            parse_dns(name)


def parse_dns(name: str) -> tuple[str, int]:
    """Raises ShardlmError for what is not NAME:PORT."""
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
        raise ShardlmError(f"replica_dns={name} must be NAME:PORT, such as replicas.default.svc:8000")
    return host, int(port)
