"""How much longer steps take than a step of the expected batch would: learnt for each TP degree.

A request's expected tokens per step are a mean: now and then it recomputes a whole canvas, mostly it computes
one block. A step's time is convex in its tokens (flat up to some 256, then linear), so the mean time of the
batches that come about is above the time of the mean batch: by 10-13% for six residents of LLaDA-8B. Whoever
holds predicted times against deadlines has to know. Knows nothing of requests.
"""

import math
from collections.abc import Sequence

import numpy as np

from dlmserve.control.policy.cost_model import CostModel

PRIOR_S = 2.0  # of instances' time, for which nothing but 1 is believed
MEMORY_S = 60.0  # of instances' time, after which what was seen counts for a third


class Pace:
    """`stepped` counts what steps took; `expect` compares it with what was expected of them."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[int, float]] = {}  # by slot: steps, and the seconds they took
        self._expected_s: dict[int, float] = {}  # by slot: of a step
        self._sums: dict[int, tuple[float, float]] = {}  # by TP degree: seconds taken, seconds expected

    def stepped(self, slot: int, duration_s: float) -> None:
        num_steps, taken_s = self._taken.get(slot, (0, 0.0))
        self._taken[slot] = num_steps + 1, taken_s + duration_s

    def expect(self, degrees: Sequence[int], batches: np.ndarray, costs: CostModel) -> None:
        """From now on, steps of these batches (packed tokens, float [slots]) are expected."""
        for slot, (num_steps, taken_s) in self._taken.items():
            if slot in self._expected_s:
                self._learn(degrees[slot], taken_s, num_steps * self._expected_s[slot])
        self._taken.clear()
        step_s = costs.step_s_each(degrees, batches).tolist()
        self._expected_s = {slot: step_s[slot] for slot in np.flatnonzero(batches).tolist()}

    def _learn(self, degree: int, taken_s: float, expected_s: float) -> None:
        before = self._sums.get(degree, (PRIOR_S, PRIOR_S))
        keep = math.exp(-expected_s / MEMORY_S)
        self._sums[degree] = keep * before[0] + taken_s, keep * before[1] + expected_s

    def ratio(self, degree: int) -> float:
        taken_s, expected_s = self._sums.get(degree, (1.0, 1.0))
        return taken_s / expected_s

    def ratios(self, degrees: Sequence[int]) -> np.ndarray:
        ratios = {degree: self.ratio(degree) for degree in set(degrees)}
        return np.array([ratios[degree] for degree in degrees])
