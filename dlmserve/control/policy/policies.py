"""Which policies there are."""

from dlmserve.config import ServerConfig
from dlmserve.control.policy.dlmserve import Dlmserve
from dlmserve.control.policy.infaas import Infaas
from dlmserve.control.policy.llumnix import Llumnix
from dlmserve.control.policy.policy import Policy
from dlmserve.control.policy.proteus import Proteus
from dlmserve.control.policy.star import Star
from dlmserve.control.policy.tediserve import Tediserve
from dlmserve.errors import ConfigError

POLICIES: dict[str, type[Policy]] = {
    "infaas": Infaas,
    "llumnix": Llumnix,
    "proteus": Proteus,
    "star": Star,
    "tediserve": Tediserve,
    "dlmserve": Dlmserve,
}


def make_policy(config: ServerConfig) -> Policy:
    """Raises ConfigError for a name that no policy has, and for an option that this one does not know."""
    if config.policy not in POLICIES:
        raise ConfigError(f"--policy is {config.policy!r}; wanted one of: {', '.join(POLICIES)}")
    policy = POLICIES[config.policy]
    for name in config.policy_options:
        if name not in policy.known_options:
            raise ConfigError(
                f"--policy-option names {name!r}, which policy {config.policy} does not have; "
                f"wanted one of: {', '.join(policy.known_options)}"
            )
    return policy(config)
