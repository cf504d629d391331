"""The queue of requests that no instance holds. Knows their order and nothing of where they may go."""

import bisect
import math
from typing import NamedTuple

from dlmserve.control.policy.request import RequestState


class Waiting(NamedTuple):
    """One that waits, with what it needs of an instance."""

    order: tuple
    number: int
    num_pages: int
    num_tokens: int


class WaitingQueue:
    """Who has started keeps its turn (nothing is preempted, not by a failure or a move either); then by
    priority, then by arrival."""

    def __init__(self) -> None:
        self._entries: list[Waiting] = []  # sorted
        self._late_at = math.inf  # nobody's deadline is earlier

    def __len__(self) -> int:
        return len(self._entries)

    def numbers(self) -> list[int]:
        """Request numbers in order."""
        return [entry.number for entry in self._entries]

    def entries(self) -> list[Waiting]:
        """A copy, in order."""
        return self._entries.copy()

    def add(self, request: RequestState) -> None:
        bisect.insort(self._entries, _entry(request))
        self._late_at = min(self._late_at, request.deadline)

    def remove(self, request: RequestState) -> None:
        entry = _entry(request)
        at = bisect.bisect_left(self._entries, entry)
        assert self._entries[at] == entry, f"request {request.number} does not wait"
        del self._entries[at]

    def late(self, now: float, requests: dict[int, RequestState]) -> list[RequestState]:
        """Those whose deadline has passed before they could start; they still wait."""
        if now <= self._late_at:
            return []
        waiting = [requests[entry.number] for entry in self._entries]
        late = [request for request in waiting if request.deadline < now and not request.started]
        on_time = (request.deadline for request in waiting if request.deadline >= now)
        self._late_at = min(on_time, default=math.inf)
        return late

    def check(self) -> None:
        """Raises AssertionError where the order is broken."""
        assert self._entries == sorted(self._entries), "the queue is out of order"
        numbers = self.numbers()
        assert len(numbers) == len(set(numbers)), "a request waits twice"


def _entry(request: RequestState) -> Waiting:
    order = (not request.started, -request.spec.priority, request.number)
    return Waiting(order, request.number, request.num_pages, len(request.canvas))
