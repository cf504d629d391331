"""The queue of requests that no instance holds. Knows their order and nothing of where they may go."""

import bisect

from dlmserve.control.policy.request import RequestState


class WaitingQueue:
    """Who has started keeps its turn (nothing is preempted, not by a failure or a move either); then by
    priority, then by arrival."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple, int]] = []  # (order, request number), sorted

    def __len__(self) -> int:
        return len(self._entries)

    def numbers(self) -> list[int]:
        """Request numbers in order."""
        return [number for _, number in self._entries]

    def add(self, request: RequestState) -> None:
        bisect.insort(self._entries, (_order(request), request.number))

    def remove(self, request: RequestState) -> None:
        entry = (_order(request), request.number)
        at = bisect.bisect_left(self._entries, entry)
        assert self._entries[at] == entry, f"request {request.number} does not wait"
        del self._entries[at]

    def check(self) -> None:
        """Raises AssertionError where the order is broken."""
        assert self._entries == sorted(self._entries), "the queue is out of order"
        numbers = self.numbers()
        assert len(numbers) == len(set(numbers)), "a request waits twice"


def _order(request: RequestState) -> tuple:
    return (not request.started, -request.spec.priority, request.number)
