"""What a policy is shown, and the form of its decisions.

Values and read access only: the scheduler owns everything that a View leads to, and acts on what it gets.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dlmserve.control.policy.cluster import Cluster, Instance
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.pace import Pace
from dlmserve.control.policy.predictions import HistoricalAverage
from dlmserve.control.policy.remaining import RemainingWork
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.stays import Stays
from dlmserve.control.policy.waiting import WaitingQueue

LEAST_ROUND_S, MOST_ROUND_S = 0.1, 0.5  # between two rounds of predictions and of load control


class Room(NamedTuple):
    """Free KV pages of an instance, and tokens of canvases that it still takes."""

    instance: Instance
    pages: int
    tokens: float


@dataclass
class View:
    cluster: Cluster
    requests: dict[int, RequestState]
    work: RemainingWork
    costs: CostModel
    history: HistoricalAverage
    pace: Pace
    stays: Stays
    waiting: WaitingQueue
    moving: set[int] = field(default_factory=set)  # requests that were asked back, to be sent elsewhere
    changed_slots: set[int] = field(default_factory=set)  # their residents have changed
    stepped_slots: set[int] = field(default_factory=set)  # their instances have ended a step
    load_changed: bool = True  # requests came, ended or have new predictions
    round_s: float = LEAST_ROUND_S

    def pace_rounds(self, share: float) -> None:
        """They take this share of the shortest SLO of all live requests, within bounds."""
        slo_s = self.work.rows()["slo_s"].min(initial=MOST_ROUND_S / share) if share else 0.0
        self.round_s = max(float(share * slo_s), LEAST_ROUND_S)

    def check(self) -> None:
        """Raises AssertionError where it does not agree with the requests."""
        self.work.check(self.requests)
        moving = {number for number, request in self.requests.items() if request.moving_to}
        assert moving == self.moving, f"{moving} are asked back, but {self.moving} are said to be"

    def room(self, max_tokens: int | None) -> list[Room]:
        """What is left of the instances that take requests at all; `max_tokens` as for `has_room`."""
        instances = self.cluster.instances.values()
        return [self.room_of(instance, max_tokens) for instance in instances if instance.has_room(0)]

    def room_of(self, instance: Instance, max_tokens: int | None) -> Room:
        """The same of one of them."""
        most = math.inf if max_tokens is None else max_tokens
        tokens = most - instance.num_tokens if instance.residents else math.inf
        return Room(instance, instance.num_pages - instance.num_pages_reserved, tokens)

    def has_room(self, instance: Instance, request: RequestState, max_tokens: int | None) -> bool:
        """`max_tokens`: of all residents' canvases together; an empty instance takes what its pages hold."""
        if not instance.has_room(request.num_pages):
            return False
        fits = max_tokens is None or instance.num_tokens + len(request.canvas) <= max_tokens
        return fits or not instance.residents


class Move(NamedTuple):
    """Ask the request back at its next block start, then send it there."""

    request: int
    instance: str


class Decision(NamedTuple):
    """Thresholds are indices into the descending list of candidates."""

    thresholds: dict[int, int] = {}  # by request
    caps: np.ndarray | None = None  # int, one per row of the remaining work; None: as they were
    refresh_blocks: dict[int, int] = {}  # by request
    moves: tuple[Move, ...] = ()


NOTHING = Decision()
