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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from statistics import NormalDist

import numpy as np

try:
    from dlmserve.simulation import _next_step as compiled
except ImportError:
    compiled = None

DATA = files("dlmserve.simulation") / "data"
NUM_NOISE_ROWS = 16381  # prime: neighbours in (request, block, step) land far apart
KEYS_PER_STEP = 7
NEVER = np.float32(-1e9)  # the score of a position that is not masked
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


class UnmaskingBlock:
    """A block that is being decoded (`instance.DecodingBlock`). `own_row`, `noise_row`: of the parts of its scores
    that stay and of those of its next step.
    """

    __slots__ = ("_unmasking", "cut", "ease", "masked", "noise_row", "own_row")

    def __init__(
        self, unmasking: "Unmasking", ease: float, own_row: int, noise_row: int, masked: int, threshold: float
    ) -> None:
        self._unmasking, self.ease = unmasking, ease
        self.own_row, self.noise_row, self.masked = own_row, noise_row, masked
        self.set_threshold(threshold)

    def set_threshold(self, threshold: float) -> None:
        self.cut = self._unmasking.cut(threshold)

    def step(self) -> tuple[list[int], list[float]]:
        """Positions in it that its next step unmasks, ascending, and their confidences."""
        positions, confidences, self.masked = self._unmasking.next_step(
            self.own_row, self.noise_row, self.masked, self.ease, self.cut
        )
        self.noise_row = (self.noise_row + KEYS_PER_STEP) % NUM_NOISE_ROWS
        return positions, confidences


# own_row, noise_row, masked, ease, cut -> positions, confidences, what is still masked
NextStep = Callable[[int, int, int, float, float], tuple[list[int], list[float], int]]


class Unmasking:
    """What blocks unmask. `next_step` is compiled where it could be built (`csrc/next_step.c`)."""

    def __init__(self, calibration: Calibration, seed: int) -> None:
        self.calibration = calibration
        rng = np.random.default_rng(seed)
        length = calibration.block_length
        assert length <= 32, f"blocks of {length} tokens: their masks are to fit in 32 bits"
        spread = calibration.spread
        self._own = spread.own * rng.standard_normal((NUM_NOISE_ROWS, length), dtype=np.float32)
        self._fresh = spread.fresh * rng.standard_normal((NUM_NOISE_ROWS, length), dtype=np.float32)
        ease = rng.standard_normal(NUM_NOISE_ROWS, dtype=np.float32)
        self._request_ease: list[float] = (spread.request * ease).tolist()
        self._block_ease: list[float] = (spread.block * ease).tolist()
        self._places = np.arange(length, dtype=np.float32) * np.float32(spread.distance / length)
        context = spread.context * (1 - np.arange(length + 1) / length)
        # By masks left and by the first of them.
        self._shifts = context.astype(np.float32)[:, None] + self._places
        self._knots, self._logits = _curve(calibration)
        self._bits = 1 << np.arange(length)
        self._cuts: dict[float, float] = {}
        self.next_step: NextStep = self._compiled() or self.next_step_in_numpy

    def begin_block(
        self, request: int, block: int, masked: int, threshold: float, steps_in_block: int = 0
    ) -> UnmaskingBlock:
        """`masked`: a bit for each position, which of them still hold the mask."""
        key = _mix(request, block)
        of_request = self._request_ease[_mix(request) % NUM_NOISE_ROWS]
        ease = of_request + self._block_ease[(key + 1) % NUM_NOISE_ROWS]
        noise_row = (key + KEYS_PER_STEP * steps_in_block) % NUM_NOISE_ROWS
        return UnmaskingBlock(self, ease, key % NUM_NOISE_ROWS, noise_row, masked, threshold)

    def _compiled(self) -> NextStep | None:
        if compiled is None:
            return None
        arrays = self._own, self._fresh, self._places, self._shifts, self._knots, self._logits
        addresses = [array.ctypes.data for array in arrays]
        tables = compiled.tables(*self._own.shape, len(self._knots), *addresses)
        return partial(compiled.next_step, tables)

    def next_step_in_numpy(
        self, own_row: int, noise_row: int, masked: int, ease: float, cut: float
    ) -> tuple[list[int], list[float], int]:
        """The same, as it is meant."""
        held = (self._bits & masked).astype(bool)
        score = self._own[own_row] + (np.float32(ease) - self._places) + self._fresh[noise_row]
        score += self._shifts[masked.bit_count(), held.argmax()]
        chosen = held & (score >= min(np.float32(cut), score[held].max()))
        positions = chosen.nonzero()[0].tolist()
        logits = np.interp(score[chosen], self._knots, self._logits)
        left = masked - sum(1 << position for position in positions)
        return positions, (1 / (1 + np.exp(-logits))).tolist(), left

    def cut(self, threshold: float) -> float:
        """The score from which on the confidence is `threshold`; infinite for 1."""
        if threshold not in self._cuts:
            logit = np.log(threshold / (1 - threshold)) if threshold < 1 else np.inf
            self._cuts[threshold] = float(np.interp(logit, self._logits, self._knots, right=np.inf))
        return self._cuts[threshold]


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
