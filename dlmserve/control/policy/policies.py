"""What a policy decides, and which policies there are."""

from collections.abc import Callable
from typing import Protocol

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Cluster, Instance
from dlmserve.control.policy.infaas import Infaas
from dlmserve.control.policy.request import RequestState
from dlmserve.errors import ConfigError


class Policy(Protocol):
    """Decides and changes nothing: the scheduler acts on what it returns."""

    def place(self, request: RequestState, cluster: Cluster) -> Instance | None:
        """An instance with room; None means that no instance has room for as many pages."""
        ...

    def threshold(self, request: RequestState) -> float:
        """The threshold of the request's next step (asked only where the client did not fix it)."""
        ...


POLICIES: dict[str, Callable[[ServerConfig], Policy]] = {"infaas": Infaas}


def make_policy(config: ServerConfig) -> Policy:
    """Raises ConfigError for a name that no policy has."""
    if config.policy not in POLICIES:
        raise ConfigError(f"--policy is {config.policy!r}; wanted one of: {', '.join(POLICIES)}")
    return POLICIES[config.policy](config)
