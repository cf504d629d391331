"""The base of all policies: first come, first served, the highest threshold, no moves.

A policy decides and changes nothing: the scheduler acts on what it returns. Each policy of its own file
overrides what it does differently.
"""

from collections.abc import Iterator

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Instance
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.view import NOTHING, Decision, View

PAPER_RESIDENT_TOKENS = 8192  # per instance: the limit of the TeDiServe paper's runs


class Policy:
    """`options` may hold the names in `known_options`; the values there are the defaults."""

    known_options: dict[str, float] = {"drop_late": 1.0}
    max_resident_tokens: int | None = PAPER_RESIDENT_TOKENS
    wants_predictions = False
    controls_thresholds = False  # by load; it then returns caps

    def __init__(self, config: ServerConfig) -> None:
        self.options = self.known_options | config.policy_options
        self.thresholds = sorted(config.thresholds, reverse=True)
        if config.max_resident_tokens is not None:
            self.max_resident_tokens = config.max_resident_tokens

    @property
    def drops_late(self) -> bool:
        """Requests whose SLO passes while they wait are given up, as in the paper's runs."""
        return bool(self.options.get("drop_late", 0.0))

    def placements(self, now: float, view: View) -> Iterator[tuple[RequestState, Instance]]:
        """Who goes where, one by one: the books that `view` leads to change in between.

        Whoever fits is placed, in the queue's order: one that does not fit does not hold up smaller ones.
        """
        blocked: list[tuple[int, int]] = []  # (pages, tokens) that no instance has room for
        for number in view.waiting():
            request = view.requests[number]
            pages, tokens = request.num_pages, len(request.canvas)
            if any(pages >= least[0] and tokens >= least[1] for least in blocked):
                continue
            instance = self.choose(now, request, view)
            if instance is None:
                blocked = [(pages, tokens), *blocked[:3]]
            else:
                yield request, instance

    def choose(self, now: float, request: RequestState, view: View) -> Instance | None:
        """The instance with the least assigned tokens that has room."""
        having_room = [
            instance
            for instance in view.cluster.instances.values()
            if view.has_room(instance, request, self.max_resident_tokens)
        ]
        return min(having_room, key=lambda instance: instance.num_tokens, default=None)

    def level(self, now: float, request: RequestState, instance: Instance, view: View) -> int:
        """Index of the threshold that a request starts with (asked only where the client did not fix it)."""
        return 0

    def refresh_blocks(self, request: RequestState) -> int:
        """Whole-canvas recompute every so many blocks, of a request that is placed."""
        return request.spec.decoding.refresh_blocks

    def decide(self, now: float, view: View) -> Decision:
        """After every event, once it is in the books."""
        return NOTHING
