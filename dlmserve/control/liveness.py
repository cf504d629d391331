"""Who has been silent for too long. Knows nothing of clocks (`now` is an argument) or of what follows."""

from collections.abc import Iterable

from dlmserve.control.policy.cluster import RankId
from dlmserve.messages import AgentHello, Heartbeat, RankHello, ToHead

Peer = RankId | str  # a rank, or a node's agent by its node's name


class Liveness:
    """Last sign of life of each peer, in seconds of the caller's clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen_at: dict[Peer, float] = {}

    def note(self, message: ToHead, now: float) -> None:
        match message:
            case Heartbeat(node, -1) | AgentHello(_, node):
                self._seen_at[node] = now
            case Heartbeat(node, device, generation) | RankHello(_, node, device, generation):
                self._seen_at[RankId(node, device, generation)] = now

    def silent(self, expected: Iterable[Peer], now: float) -> list[tuple[Peer, float]]:
        """Those of `expected` that are silent for longer than allowed, and for how long; forgets all others.

        A peer that is expected for the first time counts as heard just now.
        """
        self._seen_at = {peer: self._seen_at.get(peer, now) for peer in expected}
        waits = [(peer, now - seen_at) for peer, seen_at in self._seen_at.items()]
        return [(peer, silent_s) for peer, silent_s in waits if silent_s > self._timeout_s]

    def forgive(self, stalled_s: float) -> None:
        """The listener itself stood still for so long: heartbeats wait unread, and nobody is to blame."""
        self._seen_at = {peer: seen_at + stalled_s for peer, seen_at in self._seen_at.items()}
