"""The base of all policies: first come, first served, the highest threshold, no moves.

A policy decides and changes nothing: the scheduler acts on what it returns. Each policy of its own file
overrides what it does differently.
"""

from collections.abc import Iterator

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Instance
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.view import NOTHING, Decision, Room, View

PAPER_RESIDENT_TOKENS = 8192  # per instance: the limit of the TeDiServe paper's runs


class Policy:
    """`options` may hold the names in `known_options`; the values there are the defaults."""

    known_options: dict[str, float] = {"drop_late": 1.0}
    max_resident_tokens: int | None = PAPER_RESIDENT_TOKENS
    recompute_tokens = 0  # of the requests that start a block in the same step, at least one; 0: no limit
    round_share = 0.0  # of the shortest SLO, that predictions and load control wait for the next time
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
        room: list[Room] | None = None  # to be looked up
        most_pages = most_tokens = 0.0
        for _, number, pages, tokens in view.waiting.entries():
            if room is None:
                room = view.room(self.max_resident_tokens)
                if not room:
                    return
                most_pages, most_tokens = _most(room)
            if pages > most_pages or tokens > most_tokens:
                continue
            having_room = [each.instance for each in room if pages <= each.pages and tokens <= each.tokens]
            if having_room:
                yield view.requests[number], self.choose(view, having_room, tokens)
                room = None

    def choose(self, view: View, instances: list[Instance], num_tokens: int) -> Instance:
        """Of those that have room for a canvas of so many tokens, the one with the least assigned tokens."""
        return min(instances, key=lambda instance: instance.num_tokens)

    def level(self, now: float, request: RequestState, instance: Instance, view: View) -> int:
        """Index of the threshold that a request starts with (asked only where the client did not fix it)."""
        return 0

    def refresh_blocks(self, request: RequestState) -> int:
        """Whole-canvas recompute every so many blocks, of a request that is placed."""
        return request.spec.decoding.refresh_blocks

    def decide(self, now: float, view: View) -> Decision:
        """After every event, once it is in the books: what concerns the instances that it changed."""
        return NOTHING

    def control(self, now: float, view: View) -> Decision | None:
        """In place of `decide`, after events other than steps: what concerns all requests. None: not yet."""
        return None


def _most(room: list[Room]) -> tuple[float, float]:
    """(pages, tokens) that no instance has more of."""
    return max(each.pages for each in room), max(each.tokens for each in room)
