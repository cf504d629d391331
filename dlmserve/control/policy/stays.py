"""How much longer requests stay on an instance than their predicted steps would take: learnt from those that end.

A request waits for the step that is under way, its prediction is off, and others make steps longer. Near a
deadline that decides: under overload everybody is served at the last moment that looks sufficient, so half of
them would be late. Whoever asks whether there is time enough should ask with `high`, not with the mean.
"""

from collections import deque

PRIOR = 1.5  # before anything was observed,
PRIOR_WEIGHT = 20  # as if so many requests had taken so long
MEMORY = 256  # requests
QUANTILE = 0.9


class Stays:
    def __init__(self) -> None:
        self._open: dict[int, tuple[float, float]] = {}  # by request: (placed at, seconds then expected)
        self._ratios = deque([PRIOR] * PRIOR_WEIGHT, maxlen=MEMORY)
        self._high: float | None = None  # None: to be computed anew

    def placed(self, request: int, now: float, expected_s: float) -> None:
        self._open[request] = now, expected_s

    def ended(self, request: int, finished_at: float | None) -> None:
        """None: it did not finish, so nothing is learnt."""
        placed_at, expected_s = self._open.pop(request, (0.0, 0.0))
        if finished_at is not None and expected_s > 0:
            self._ratios.append((finished_at - placed_at) / expected_s)
            self._high = None

    @property
    def high(self) -> float:
        """Nine in ten stay at most so many times as long as expected."""
        if self._high is None:
            self._high = sorted(self._ratios)[int(QUANTILE * len(self._ratios))]
        return self._high
