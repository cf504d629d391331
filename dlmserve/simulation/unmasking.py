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
from collections import OrderedDict
from dataclasses import asdict, dataclass
from importlib.resources import files
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

DATA = files("dlmserve.simulation") / "data"
NUM_NOISE_ROWS = 16381  # prime: neighbours in (request, block, step) land far apart
KEYS_PER_STEP = 7
NEVER = -1e9  # the score of a position that is not masked
REQUESTS_AHEAD, BLOCKS_AHEAD = 16, 4  # are decoded together
MAX_GROUPS = 512  # of them that are remembered: enough for all live requests
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


class Courses(NamedTuple):
    """What some blocks' steps unmask, from their present state to their end, by steps and then by blocks."""

    num_blocks: int
    positions: list[int]  # within a block
    confidences: list[float]
    starts: list[int]  # of step k of block b in both lists: at k * num_blocks + b

    def step(self, step: int, block: int) -> tuple[list[int], list[float]]:
        at = step * self.num_blocks + block
        start, end = self.starts[at], self.starts[at + 1]
        return self.positions[start:end], self.confidences[start:end]


class UnmaskingBlock:
    """A block that is being decoded (`instance.DecodingBlock`). It follows a course until its threshold changes."""

    __slots__ = (
        "_at",
        "_courses",
        "_place",
        "_unmasking",
        "block",
        "masked",
        "request",
        "steps",
        "threshold",
    )

    def __init__(
        self, unmasking: "Unmasking", request: int, block: int, masked: int, threshold: float, steps: int
    ) -> None:
        self._unmasking = unmasking
        self.request, self.block = request, block
        self.masked, self.threshold, self.steps = masked, threshold, steps
        self._courses: Courses | None = None
        self._place = self._at = 0

    def set_threshold(self, threshold: float) -> None:
        if threshold != self.threshold:
            self.threshold, self._courses = threshold, None

    def step(self) -> tuple[list[int], list[float]]:
        if self._courses is None:
            self._courses, self._place = self._unmasking.courses(self)
            self._at = 0
        positions, confidences = self._courses.step(self._at, self._place)
        self._at += 1
        self.steps += 1
        for position in positions:
            self.masked ^= 1 << position
        return positions, confidences


class Unmasking:
    """Courses of blocks. Neighbouring requests' next blocks are decoded ahead together: few array operations."""

    def __init__(self, calibration: Calibration, seed: int) -> None:
        self.calibration = calibration
        rng = np.random.default_rng(seed)
        length = calibration.block_length
        spread = calibration.spread
        self._own = spread.own * rng.standard_normal((NUM_NOISE_ROWS, length), dtype=np.float32)
        self._fresh = spread.fresh * rng.standard_normal((NUM_NOISE_ROWS, length), dtype=np.float32)
        self._ease = rng.standard_normal(NUM_NOISE_ROWS, dtype=np.float32)
        self._places = np.arange(length, dtype=np.float32) * np.float32(spread.distance / length)
        context = spread.context * (1 - np.arange(length + 1) / length)
        self._context = context.astype(np.float32)  # by masks left
        self._knots, self._logits = _curve(calibration)
        self._whole = (1 << length) - 1
        self._ahead: OrderedDict[tuple[int, int, float], Courses] = OrderedDict()

    def begin_block(
        self, request: int, block: int, masked: int, threshold: float, steps_in_block: int = 0
    ) -> UnmaskingBlock:
        """`masked`: a bit for each position, which of them still hold the mask."""
        return UnmaskingBlock(self, request, block, masked, threshold, steps_in_block)

    def courses(self, at: UnmaskingBlock) -> tuple[Courses, int]:
        """Its course from there on, and its place among those that come with it."""
        if at.steps or at.masked != self._whole:
            bits = [at.masked >> position & 1 for position in range(self.calibration.block_length)]
            return self._decode([(at.request, at.block)], np.array([bits], bool), at.steps, at.threshold), 0
        # Neighbours in number arrive together; they all need it at the highest threshold, few at a lower one.
        num_requests = REQUESTS_AHEAD if at.threshold == self.calibration.thresholds[0] else 1
        first_request, first_block = (
            at.request - at.request % num_requests,
            at.block - at.block % BLOCKS_AHEAD,
        )
        key = first_request, first_block, at.threshold
        if key not in self._ahead:
            pairs = [
                (first_request + i, first_block + j) for i in range(num_requests) for j in range(BLOCKS_AHEAD)
            ]
            masked = np.ones((len(pairs), self.calibration.block_length), bool)
            self._ahead[key] = self._decode(pairs, masked, 0, at.threshold)
            if len(self._ahead) > MAX_GROUPS:
                self._ahead.popitem(last=False)
        return self._ahead[key], (at.request - first_request) * BLOCKS_AHEAD + at.block - first_block

    def _decode(
        self, pairs: list[tuple[int, int]], masked: np.ndarray, steps: int, threshold: float
    ) -> Courses:
        """`pairs`: (request, block); `masked`: bool [pairs, block_length]; `steps`: all of them have made so many."""
        cut, keys = self._cut(threshold), np.array([_mix(request, block) for request, block in pairs])
        base = np.where(masked, self._scores(pairs, keys), np.float32(NEVER))
        keys += KEYS_PER_STEP * steps
        live = np.arange(len(pairs))
        positions, passed, nums = [], [], []
        while len(live):
            score, num_masked = self._scores_now(base, keys)
            chosen = score >= cut
            chosen[np.arange(len(live)), score.argmax(1)] = True
            positions.append(chosen.nonzero()[1])
            passed.append(score[chosen])
            num_chosen = chosen.sum(1)
            nums.append(np.bincount(live, num_chosen, minlength=len(pairs)))
            base[chosen] = NEVER
            keys += KEYS_PER_STEP
            left = num_masked > num_chosen
            if not left.all():
                live, base, keys = live[left], base[left], keys[left]
        logits = np.interp(np.concatenate(passed), self._knots, self._logits)
        ends = np.cumsum(np.concatenate(nums)).astype(int).tolist()
        confidences = (1 / (1 + np.exp(-logits))).tolist()
        return Courses(len(pairs), np.concatenate(positions).tolist(), confidences, [0, *ends])

    def _scores(self, pairs: list[tuple[int, int]], keys: np.ndarray) -> np.ndarray:
        """Without what changes from step to step, float32 [pairs, block_length]."""
        spread = self.calibration.spread
        of_requests = [_mix(request) % NUM_NOISE_ROWS for request, _ in pairs]
        ease = spread.request * self._ease[of_requests]
        ease = ease + spread.block * self._ease[(keys + 1) % NUM_NOISE_ROWS]
        return self._own[keys % NUM_NOISE_ROWS] + (ease[:, None] - self._places)

    def _scores_now(self, base: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores of a step, and the masks of each block before it."""
        masked = base > NEVER / 2
        num_masked = masked.sum(1)
        shift = self._context[num_masked] + self._places[masked.argmax(1)]
        return base + self._fresh[keys % NUM_NOISE_ROWS] + shift[:, None], num_masked

    def _cut(self, threshold: float) -> np.float32:
        logit = np.log(threshold / (1 - threshold)) if threshold < 1 else np.inf
        return np.float32(np.interp(logit, self._logits, self._knots, right=np.inf))


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
