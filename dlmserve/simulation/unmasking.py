"""How many of a block's masked tokens pass a threshold, and with which confidences, without a model.

Each masked position j of a block has at each step a latent score

    x_j = ease of the request + ease of the block + own_j + fresh_j(step)
          + context * (unmasked share of the block) - distance * (j - first masked position) / block length

with normal ease, own (constant within a block) and fresh noise: more context helps, far positions are
harder, and a request that went slowly so far goes on slowly. A monotone curve turns scores into confidences;
its knots, one for each measured threshold, are fitted so that the mean steps of a block equal the measured
ones (`fit`). A position is unmasked at confidence >= threshold, the best one always, as the kernels do it.

The noise is looked up by (seed, request, block, step), not drawn in turn: a request's course depends on its
thresholds only, never on who else is in the batch or on the policy. Knows nothing of instances or spans.
"""

import csv
import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from statistics import NormalDist

import numpy as np

DATA = files("dlmserve.simulation") / "data"
NUM_NOISE_ROWS = 16381  # prime: neighbours in (request, block, step) land far apart
KEYS_PER_STEP = 7
NEVER = -1e9  # the score of a position that is not masked
EXTRA_LOGITS = 6.0  # how far the curve goes on, straight, beyond its first and last knot


@dataclass(frozen=True)
class Spread:
    """Standard deviations and effects of the score's parts; see the module's formula."""

    request: float = 0.35
    block: float = 0.25
    own: float = 0.8
    fresh: float = 0.5
    context: float = 1.0
    distance: float = 2.0


@dataclass(frozen=True)
class Calibration:
    """`cuts[k]`: the score at which the confidence is `thresholds[k]`; both descending."""

    block_length: int
    thresholds: tuple[float, ...]
    cuts: tuple[float, ...]
    spread: Spread = Spread()

    def to_json(self) -> dict:
        return asdict(self)


def load_calibration(name: str = "gsm8k") -> Calibration:
    """One that the package ships: "gsm8k" or "harder" (the harder text of the same table)."""
    entry = json.loads((DATA / "unmasking.json").read_text(encoding="utf-8"))[name]
    spread = Spread(**entry["spread"])
    return Calibration(entry["block_length"], tuple(entry["thresholds"]), tuple(entry["cuts"]), spread)


def read_table(column: str) -> dict[float, float]:
    """A column of the measured table, by threshold, descending."""
    lines = (DATA / "llada8b_gsm8k_thresholds.csv").read_text(encoding="utf-8").splitlines()
    return {float(row["threshold"]): float(row[column]) for row in csv.DictReader(lines)}


class Unmasking:
    """The blocks that are being decoded, one row each: a step of many requests is one array operation."""

    def __init__(self, calibration: Calibration, seed: int) -> None:
        self.calibration = calibration
        rng = np.random.default_rng(seed)
        length = calibration.block_length
        spread = calibration.spread
        self._own = spread.own * rng.standard_normal((NUM_NOISE_ROWS, length), dtype=np.float32)
        self._fresh = spread.fresh * rng.standard_normal((NUM_NOISE_ROWS, length), dtype=np.float32)
        self._ease = rng.standard_normal(NUM_NOISE_ROWS, dtype=np.float32)
        self._places = np.arange(length, dtype=np.float32) * np.float32(spread.distance / length)
        self._context = (spread.context * (1 - np.arange(length + 1) / length)).astype(
            np.float32
        )  # by masks left
        self._knots, self._logits = _curve(calibration)
        self._free: list[int] = []
        self._base = np.zeros((0, length), np.float32)  # NEVER where unmasked
        self._num_masked = np.zeros(0, np.int64)
        self._cuts = np.zeros(0, np.float32)
        self._keys = np.zeros(0, np.int64)  # of the row's fresh noise: moves with each step

    def enter(self) -> int:
        """A row for one resident request."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def leave(self, row: int) -> None:
        self._free.append(row)

    def begin_block(
        self, row: int, request: int, block: int, masked: np.ndarray, steps_in_block: int = 0
    ) -> None:
        """`masked`: bool [at most block_length], which positions still hold the mask."""
        spread = self.calibration.spread
        key = _mix(request, block)
        ease = spread.request * self._ease[_mix(request) % NUM_NOISE_ROWS]
        ease += spread.block * self._ease[(key + 1) % NUM_NOISE_ROWS]
        base = self._base[row]
        base[:] = NEVER
        scores = self._own[key % NUM_NOISE_ROWS] + (ease - self._places)
        np.copyto(base[: len(masked)], scores[: len(masked)], where=masked)
        self._num_masked[row] = masked.sum()
        self._keys[row] = key + KEYS_PER_STEP * steps_in_block

    def set_threshold(self, row: int, threshold: float) -> None:
        logit = np.log(threshold / (1 - threshold)) if threshold < 1 else np.inf
        self._cuts[row] = np.interp(logit, self._logits, self._knots, right=np.inf)

    def step(self, rows: list[int]) -> tuple[list[int], list[int], list[float], np.ndarray]:
        """One step: (index into rows, position in block, confidence) of all that is unmasked, in that order.

        The fourth value is the number of masks each row has left, int [len(rows)].
        """
        at = np.array(rows)
        score = self._base[at]
        num_masked = self._num_masked[at]
        first_masked = (score > NEVER / 2).argmax(1)
        shift = self._context[num_masked] + self._places[first_masked]
        score += self._fresh[self._keys[at] % NUM_NOISE_ROWS]
        score += shift[:, None]
        chosen = score >= self._cuts[at][:, None]
        chosen[np.arange(len(at)), score.argmax(1)] = True
        flat = chosen.ravel().nonzero()[0]
        index = flat // chosen.shape[1]
        position = flat - index * chosen.shape[1]
        self._base[at[index], position] = NEVER
        left = num_masked - np.bincount(index, minlength=len(at))
        self._num_masked[at] = left
        self._keys[at] += KEYS_PER_STEP
        logits = np.interp(score.ravel()[flat], self._knots, self._logits)
        confidence = 1 / (1 + np.exp(-logits))
        return index.tolist(), position.tolist(), confidence.tolist(), left

    def masked(self, row: int) -> np.ndarray:
        """Bool [block_length]."""
        return self._base[row] > NEVER / 2

    def _grow(self) -> None:
        size = len(self._cuts)
        more = max(64, size)
        self._free += range(size + more - 1, size - 1, -1)
        self._base = np.concatenate((self._base, np.zeros((more, self._base.shape[1]), np.float32)))
        self._num_masked = np.concatenate((self._num_masked, np.zeros(more, np.int64)))
        self._cuts = np.concatenate((self._cuts, np.zeros(more, np.float32)))
        self._keys = np.concatenate((self._keys, np.zeros(more, np.int64)))


def fit(tokens_per_step: dict[float, float], block_length: int, spread: Spread = Spread()) -> Calibration:
    """Cuts with which a block takes block_length / tokens_per_step steps on average, by bisection."""
    thresholds = tuple(sorted(tokens_per_step, reverse=True))
    wanted = [block_length / tokens_per_step[threshold] for threshold in thresholds]
    blocks = _Blocks(block_length, spread)
    return Calibration(block_length, thresholds, tuple(blocks.find_cut(steps) for steps in wanted), spread)


class _Blocks:
    """A sample of blocks with stratified ease; every cut is tried on the same noise."""

    NUM = 4096
    MAX_STEPS = 64

    def __init__(self, length: int, spread: Spread) -> None:
        rng = np.random.default_rng(0)
        self._spread, self._length = spread, length
        ease = rng.permutation([NormalDist().inv_cdf((i + 0.5) / self.NUM) for i in range(self.NUM)])
        ease = ease * np.hypot(spread.request, spread.block)
        self._base = ease[:, None] + spread.own * rng.standard_normal((self.NUM, length))
        self._fresh = spread.fresh * rng.standard_normal((self.NUM + self.MAX_STEPS, length))

    def find_cut(self, num_steps: float) -> float:
        low, high = -8.0, 8.0  # few steps, many steps
        for _ in range(20):
            middle = (low + high) / 2
            if self._mean_steps(middle) > num_steps:
                high = middle
            else:
                low = middle
        return round((low + high) / 2, 4)

    def _mean_steps(self, cut: float) -> float:
        spread, length = self._spread, self._length
        live, masked, total = np.arange(self.NUM), np.ones((self.NUM, length), bool), 0
        step = 0
        while len(live):
            total += len(live)
            context = spread.context * (1 - masked.mean(1))
            away = (np.arange(length) - masked.argmax(1)[:, None]) * (spread.distance / length)
            score = self._base[live] + self._fresh[live + step % self.MAX_STEPS] + context[:, None] - away
            score[~masked] = NEVER
            chosen = score >= cut
            chosen[np.arange(len(live)), score.argmax(1)] = True
            masked &= ~chosen
            kept = masked.any(1)
            live, masked = live[kept], masked[kept]
            step += 1
        return total / self.NUM


def _curve(calibration: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """Scores and logits of the confidence curve, ascending, its end pieces prolonged."""
    thresholds = np.array(calibration.thresholds[::-1])
    logits, cuts = np.log(thresholds / (1 - thresholds)), np.array(calibration.cuts[::-1])
    below = cuts[0] - EXTRA_LOGITS * (cuts[1] - cuts[0]) / (logits[1] - logits[0])
    above = cuts[-1] + EXTRA_LOGITS * (cuts[-1] - cuts[-2]) / (logits[-1] - logits[-2])
    return np.array([below, *cuts, above]), np.array(
        [logits[0] - EXTRA_LOGITS, *logits, logits[-1] + EXTRA_LOGITS]
    )


def _mix(request: int, block: int = 0) -> int:
    """A large number that looks random: multiplicative hashing of both."""
    return ((request * 2654435761 + block * 40503 + 12345) ^ (request >> 3) * 97) & 0x3FFFFFFF
