"""Who has been silent for too long. Knows nothing of clocks (`now` is an argument) or of what follows."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from dlmserve.control.policy.cluster import Instance, RankId
from dlmserve.messages import AgentHello, Heartbeat, RankHello, ToHead

Peer = RankId | str  # a rank, or a node's agent by its node's name
P = TypeVar("P")

# A step over all residents may take this many times what the small warm-up step took per token: attention
# grows faster than the tokens, and others may use the same cores.
HANG_FACTOR = 4.0


class Liveness(Generic[P]):
    """Last sign of life of each P, in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._heard_at: dict[P, float] = {}

    def hear(self, who: P, now: float) -> None:
        self._heard_at[who] = now

    def silent(self, limits_s: Mapping[P, float], now: float) -> list[tuple[P, float]]:
        """Those that are silent for longer than their limit, and for how long; forgets whoever has none.

        Who has a limit for the first time counts as heard just now.
        """
        self._heard_at = {who: self._heard_at.get(who, now) for who in limits_s}
        waits = [(who, now - heard_at) for who, heard_at in self._heard_at.items()]
        return [(who, silent_s) for who, silent_s in waits if silent_s > limits_s[who]]

    def silence_s(self, who: P, now: float) -> float:
        """0 for somebody who was never expected."""
        return now - self._heard_at.get(who, now)

    def forgive(self, stalled_s: float) -> None:
        """The listener itself stood still for so long: what was said waits unread, nobody is to blame."""
        self._heard_at = {who: heard_at + stalled_s for who, heard_at in self._heard_at.items()}


def sender(message: ToHead) -> Peer | None:
    """Who shows with this message that its process runs."""
    match message:
        case Heartbeat(node, -1) | AgentHello(_, node):
            return node
        case Heartbeat(node, device, generation) | RankHello(_, node, device, generation):
            return RankId(node, device, generation)
    return None


def step_limit_s(instance: Instance, at_least_s: float) -> float:
    """The longest step that is believable of its residents: longer without a report, and it hangs."""
    return max(at_least_s, HANG_FACTOR * instance.token_s * instance.num_tokens)
