"""What is being asked of the cluster: request classes, their rates and SLOs over a sliding window.

Counts arrivals in slices of the window, so that its memory does not grow with the rate. Knows nothing of
instances and of what becomes of requests.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dlmserve.control.policy.plan import RequestClass

BIN_TOKENS = 256
MAX_CLASSES = 16  # the planner's time grows with them: bins are doubled until they are as few
NUM_SLICES = 10
RECENT = 0.25  # of the window
NO_CHANCE = 2.0  # standard deviations

Bin = tuple[int, int]  # prompt and output


@dataclass
class Count:
    """Sums over the requests of one bin."""

    num: float = 0.0
    prompt: float = 0.0
    output: float = 0.0
    num_slo: float = 0.0  # those that have one
    slo_s: float = 0.0

    def add(self, other: "Count") -> None:
        for name in ("num", "prompt", "output", "num_slo", "slo_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Slice:
    start_at: float
    counts: dict[Bin, Count] = field(default_factory=dict)


class WorkloadMonitor:
    """`classes(now)`: bins of 256 tokens, each with the mean lengths of its requests, their rate and mean SLO.

    The paper plans with the bins' upper ends; an output of 96 tokens would count as 256.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._slices: deque[Slice] = deque()
        self._first_at: float | None = None  # since when it counts

    def arrived(self, now: float, prompt: int, output: int, slo_s: float | None) -> None:
        """Lengths in tokens."""
        if self._first_at is None:
            self._first_at = now
        if not self._slices or now >= self._slices[-1].start_at + self.window_s / NUM_SLICES:
            self._slices.append(Slice(now))
            self._forget(now)
        key = (-(-prompt // BIN_TOKENS), -(-output // BIN_TOKENS))
        one = Count(1, prompt, output, slo_s is not None, slo_s or 0.0)
        self._slices[-1].counts.setdefault(key, Count()).add(one)

    def classes(self, now: float) -> list[RequestClass]:
        """By descending rate; none where nothing came within the window."""
        return sorted(self.bins(now).values(), key=lambda each: -each.rps)

    def bins(self, now: float) -> dict[Bin, RequestClass]:
        """The same by bin: its most prompt and output tokens."""
        self._forget(now)
        if not self._slices or self._first_at is None:
            return {}
        # Rates over the window, or over the time since the first arrival where that is shorter (a slice at least).
        over_s = min(max(now - self._first_at, self.window_s / NUM_SLICES), self.window_s)
        width, counts = merge([s.counts for s in self._slices])
        tokens = width * BIN_TOKENS
        return {(p * tokens, o * tokens): _class(each, over_s) for (p, o), each in sorted(counts.items())}

    def trend(self, now: float) -> float:
        """The rate of late over the rate of the window; 1 where the difference may be chance."""
        self._forget(now)
        recent = [each for each in self._slices if each.start_at >= now - RECENT * self.window_s]
        if not recent or len(recent) == len(self._slices):
            return 1.0
        share = (now - recent[0].start_at) / (now - self._slices[0].start_at)
        expected, found = share * _num(self._slices), _num(recent)
        return found / expected if abs(found - expected) > NO_CHANCE * expected**0.5 else 1.0

    def _forget(self, now: float) -> None:
        while self._slices and self._slices[0].start_at <= now - self.window_s:
            self._slices.popleft()


def _num(slices: Iterable[Slice]) -> float:
    return sum(count.num for each in slices for count in each.counts.values())


def merge(parts: list[dict[Bin, Count]]) -> tuple[int, dict[Bin, Count]]:
    """The sum of the parts in the finest bins that make no more than MAX_CLASSES, and their width in bins."""
    width = 1
    while True:
        merged: dict[Bin, Count] = {}
        for counts in parts:
            for (prompt, output), count in counts.items():
                key = (-(-prompt // width), -(-output // width))
                merged.setdefault(key, Count()).add(count)
        if len(merged) <= MAX_CLASSES:
            return width, merged
        width *= 2


def _class(count: Count, over_s: float) -> RequestClass:
    slo_s = count.slo_s / count.num_slo if count.num_slo else None
    return RequestClass(count.prompt / count.num, count.output / count.num, count.num / over_s, slo_s)
