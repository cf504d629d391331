"""What is known of a request's progress, and the interface of those who predict its remaining steps.

Owns the feature vector and the fallback predictor. Knows nothing of instances, and nothing of where the
predictor runs: the scheduler asks with a Predict action and is told by a Predicted event.

Features: appendix A of the TeDiServe paper; `confidence_*` are over all output positions that a step has
computed so far, each at the last one that did. Ours: `prompt_length`, all that tells requests apart on their
arrival; `masks_before_end`, which counts only up to the first end token that is unmasked already; and
`hidden_*`, what the instance reads from hidden states (worker/hidden_reader.py), NaN where it reads none.
"""

from array import array
from collections.abc import Sequence
from math import nan
from typing import NamedTuple, Protocol

import numpy as np

FEATURES = (
    "step", "unmasked", "block", "unmasked_in_block", "output_length",
    "confidence_min", "confidence_q25", "confidence_median", "confidence_mean", "confidence_q75",
    "prompt_length", "masks_before_end", "hidden_blocks", "hidden_steps",
)  # fmt: skip
STEP, UNMASKED, OUTPUT_LENGTH = map(FEATURES.index, ("step", "unmasked", "output_length"))
QUANTILES = np.array([0.0, 0.25, 0.5, 0.75])
HIDDEN_BLOCKS, HIDDEN_STEPS = map(FEATURES.index, ("hidden_blocks", "hidden_steps"))

# Before anything was observed: LLaDA-8B on GSM8K, tokens per step with a dual cache (TeDiServe artifact).
PUBLISHED_TOKENS_PER_STEP = {0.5: 6.58, 0.6: 5.65, 0.7: 4.77, 0.8: 3.89, 0.9: 3.02}
OWN_STEPS = 8.0  # how many steps of a request's own outweigh the usual pace
LEAST_SHARE = 0.1  # of what is left of an output: one that is past the usual end goes on for so much
PRIOR_STEPS = 100.0  # how many observed steps outweigh what was published
PRIOR_REQUESTS = 5.0  # and how many finished requests the assumption that answers fill their output
PRIOR_STEPS_PER_REQUEST = 100.0  # in about so many steps
MAX_STEPS = 20_000.0  # older observations fade
# Observed steps after which the means are computed anew: as many as there were by then.
MIN_STALE, MAX_STALE = 100, 1000


NOT_READ = (nan, nan)


class Progress(NamedTuple):
    """How far a request was when its prediction was asked for."""

    request: int
    steps: int
    num_unmasked: int
    block: int
    num_unmasked_in_block: int
    output_length: int
    block_length: int
    prompt_length: int
    num_masks_before_end: int  # masked output positions before the first end token, or in all
    confidences: array  # float32, of the output positions computed so far, in any order
    hidden: tuple[float, float] = NOT_READ  # blocks after the current one, and steps left in that one


def features(progress: Sequence[Progress]) -> np.ndarray:
    """float64 [n, len(FEATURES)]; the confidence columns are 0 before the first step."""
    table = np.zeros((len(progress), len(FEATURES)))
    if not progress:
        return table
    counts = np.array([row[1:9] for row in progress], dtype=float)
    steps, unmasked, block, in_block, length, block_length, prompt_length, before_end = counts.T
    table[:, 0] = (steps + 1) / length
    table[:, 1] = unmasked / length
    table[:, 2] = block / (length / block_length)
    table[:, 3] = in_block / block_length
    table[:, 4] = length
    table[:, 5:10] = _confidence_features([row.confidences for row in progress])
    table[:, 10] = prompt_length
    table[:, 11] = before_end / length
    table[:, 12:] = [row.hidden for row in progress]
    return table


def _confidence_features(rows: list[array]) -> np.ndarray:
    """Minimum, lower quartile, median, mean and upper quartile of each row, float64 [n, 5]; 0 where it is empty."""
    table = np.zeros((len(rows), 5))
    filled = [i for i, row in enumerate(rows) if row]
    if not filled:
        return table
    lengths = np.array([len(rows[i]) for i in filled], np.int32)
    width = int(lengths.max())
    held = np.arange(width, dtype=np.int32) < lengths[:, None]
    values = np.frombuffer(b"".join([rows[i] for i in filled]), np.float32)
    table[filled, 3] = np.add.reduceat(values, np.cumsum(lengths) - lengths, dtype=float) / lengths
    ascending = np.full(held.shape, np.inf, np.float32)
    ascending[held] = values
    ascending.sort(axis=1)
    # numpy's linear quantiles.
    last = lengths[:, None] - 1
    places = last * QUANTILES
    below = places.astype(np.intp)
    starts = width * np.arange(len(lengths))[:, None]
    low, high = (
        ascending.take(starts + place).astype(float) for place in (below, np.minimum(below + 1, last))
    )
    table[np.array(filled)[:, None], [0, 1, 2, 4]] = low + (places - below) * (high - low)
    return table


class StepPredictor(Protocol):
    """How many steps are left: `features` float [n, F], `thresholds` [T] -> steps float [n, T]."""

    def predict(self, features: np.ndarray, thresholds: np.ndarray) -> np.ndarray: ...


class HistoricalAverage:
    """The predictor without training: tokens per step at each threshold, and how much of an output is used.

    Both are running means over what this server did, starting from published figures.
    """

    def __init__(self) -> None:
        self._seen: dict[float, list[float]] = {}  # threshold -> [steps, tokens]
        self._num_observed = 0
        self._means: tuple[bytes, np.ndarray] | None = None  # (thresholds, tokens per step)
        self._renew_at = 0
        self._num_finished = PRIOR_REQUESTS
        self._used = PRIOR_REQUESTS  # sum over finished requests of the share of the output that was used
        self._steps = PRIOR_REQUESTS * PRIOR_STEPS_PER_REQUEST  # and of their steps

    def observe_steps(self, threshold: float, num_steps: int, num_unmasked: int) -> None:
        self._num_observed += num_steps
        seen = self._seen.setdefault(threshold, [0.0, 0.0])
        seen[0] += num_steps
        seen[1] += num_unmasked
        if seen[0] > MAX_STEPS:
            seen[0], seen[1] = seen[0] / 2, seen[1] / 2

    def observe_finish(self, share_used: float, num_steps: int) -> None:
        self._num_finished += 1
        self._used += share_used
        self._steps += num_steps
        if self._num_finished > 200:
            self._num_finished, self._used, self._steps = (
                self._num_finished / 2,
                self._used / 2,
                self._steps / 2,
            )

    @property
    def steps_per_request(self) -> float:
        """Of the answers of late."""
        return self._steps / self._num_finished

    @property
    def share_used(self) -> float:
        """Of their output, by the answers of late."""
        return self._used / self._num_finished

    def tokens_per_step(self, thresholds: np.ndarray) -> np.ndarray:
        """float [T]. A threshold that was rarely used follows the published ratio to the others."""
        key = thresholds.tobytes()
        if self._means is None or self._means[0] != key or self._num_observed >= self._renew_at:
            self._means = key, self._tokens_per_step(thresholds)
            self._renew_at = self._num_observed + min(max(self._num_observed, MIN_STALE), MAX_STALE)
        return self._means[1]

    def _tokens_per_step(self, thresholds: np.ndarray) -> np.ndarray:
        published = _published(thresholds)
        if not self._seen:
            return published
        used = np.array(list(self._seen))
        steps, tokens = np.array(list(self._seen.values())).T
        expected = _published(used) * steps
        scale = (tokens.sum() + PRIOR_STEPS * 3) / (expected.sum() + PRIOR_STEPS * 3)
        nearest = np.abs(used[:, None] - thresholds) < 0.025
        steps_at, tokens_at = steps @ nearest, tokens @ nearest
        return np.maximum((tokens_at + PRIOR_STEPS * scale * published) / (steps_at + PRIOR_STEPS), 1.0)

    def steps_of_new(self, output_length: int, thresholds: np.ndarray) -> np.ndarray:
        """What `steps_left` says of one request that has not begun, float [T], for less."""
        tokens = max(self.share_used, LEAST_SHARE) * output_length
        return np.maximum(tokens / self.tokens_per_step(thresholds), 1.0)

    def predict(self, features: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
        length = features[:, OUTPUT_LENGTH]
        steps = np.maximum(features[:, STEP] * length - 1, 0.0)
        return self.steps_left(length, features[:, UNMASKED] * length, steps, thresholds)

    def steps_left(
        self, output_length: np.ndarray, unmasked: np.ndarray, steps: np.ndarray, thresholds: np.ndarray
    ) -> np.ndarray:
        """The same from each request's tokens in all, tokens unmasked and steps done, [n]."""
        usual = self.share_used * output_length
        tokens = np.maximum(usual - unmasked, LEAST_SHARE * (output_length - unmasked))
        speeds = self.tokens_per_step(thresholds)
        # One that was slower than usual goes on so; one that was faster may have had a lower threshold.
        own = (unmasked + OWN_STEPS * speeds[0]) / (steps + OWN_STEPS)
        pace = np.minimum(own / speeds[0], 1.0)
        return np.maximum(tokens[:, None] / (pace[:, None] * speeds), 1.0)


def _published(thresholds: np.ndarray) -> np.ndarray:
    known = sorted(PUBLISHED_TOKENS_PER_STEP)
    return np.interp(thresholds, known, [PUBLISHED_TOKENS_PER_STEP[g] for g in known])
