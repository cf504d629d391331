"""The Proteus baseline: a mix of thresholds for the load of the last half minute; placed as INFaaS does.

Source: Ahmad et al., "Proteus: A High-Throughput Inference-Serving System with Accuracy Scaling" (ASPLOS
2024), as the baseline of the TeDiServe paper (arXiv 2606.29094) has it. A request keeps its threshold.
"""

from collections import deque
from collections.abc import Iterator
from itertools import combinations

import numpy as np

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Instance
from dlmserve.control.policy.policy import Policy
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.view import View

SOLVE_S = 30.0
# LLaDA-8B on GSM8K, 256 output tokens, block length 32 (TeDiServe artifact): threshold -> accuracy, %.
ACCURACY = {0.5: 65.9, 0.6: 71.7, 0.7: 77.0, 0.8: 78.9, 0.9: 78.6}


class Proteus(Policy):
    known_options = Policy.known_options | {"supply": 0.9}

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        known = sorted(ACCURACY)
        self._accuracy = np.interp(self.thresholds, known, [ACCURACY[g] for g in known])
        self._mix = np.eye(len(self.thresholds))[0]  # the highest threshold only
        self._credit = np.zeros(len(self.thresholds))
        self._solved_at = -np.inf
        self._newest = -1  # request number
        self._recent: deque[tuple[float, int, int]] = deque()  # (arrived at, canvas, output length)

    def placements(self, now: float, view: View) -> Iterator[tuple[RequestState, Instance]]:
        """As the base; every arrival passes through here once, whether it is placed or has to wait."""
        newest = self._newest
        for entry in view.waiting.entries():
            if entry.number > newest:
                request = view.requests[entry.number]
                self._recent.append((request.arrived_at, len(request.canvas), request.output_length))
                self._newest = max(self._newest, entry.number)
        while self._recent and self._recent[0][0] < now - SOLVE_S:
            self._recent.popleft()
        return super().placements(now, view)

    def level(self, now: float, request: RequestState, instance: Instance, view: View) -> int:
        """Smooth weighted round-robin over the mix; one that moves or is recovered keeps its threshold."""
        if request.started:
            return int(view.work.get(request.number, "current"))
        if now >= self._solved_at + SOLVE_S and self._recent:
            self._solved_at = now
            self._mix = self._solve(now, view)
        self._credit += self._mix
        level = int(self._credit.argmax())
        self._credit[level] -= 1.0
        return level

    def _solve(self, now: float, view: View) -> np.ndarray:
        arrived, canvas, output = np.array(self._recent, dtype=float).T
        rate = len(arrived) / max(now - arrived[0], 1.0)
        work_s = rate * self._instance_seconds(view, canvas.mean(), output.mean())
        supply = self.options["supply"] * len(view.cluster.serving())
        return best_mix(self._accuracy, work_s, supply)

    def _instance_seconds(self, view: View, canvas: float, output: float) -> np.ndarray:
        """Of one mean request at each threshold, with as many beside it as an instance takes."""
        steps = output / view.history.tokens_per_step(np.array(self.thresholds))
        seats = max(1.0, (self.max_resident_tokens or canvas) // canvas)
        num_blocks, block_length = output / 32, 32
        tokens = num_blocks * canvas + (steps - num_blocks) * block_length
        degree = min(instance.tp_degree for instance in view.cluster.serving())
        step_s = view.costs.step_s_many(degree, seats * tokens / steps)
        return steps * step_s / seats


def best_mix(accuracy: np.ndarray, work: np.ndarray, supply: float) -> np.ndarray:
    """Shares f [T] that maximise f . accuracy with f . work <= supply and sum f = 1.

    A linear program with two constraints has an optimum of at most two shares, so all pairs are tried. Where
    nothing fits, everybody gets what takes the least work.
    """
    best = np.eye(len(work))[int(work.argmin())]
    if work.min() > supply:
        return best
    mixes = [np.eye(len(work))[i] for i in np.flatnonzero(work <= supply)]
    for i, j in combinations(range(len(work)), 2):
        if min(work[i], work[j]) <= supply < max(work[i], work[j]):
            mix = np.zeros(len(work))
            mix[i] = (supply - work[j]) / (work[i] - work[j])
            mix[j] = 1 - mix[i]
            mixes.append(mix)
    return max(mixes, key=lambda mix: float(mix @ accuracy))
