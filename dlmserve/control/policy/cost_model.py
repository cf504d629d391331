"""How long a step takes: latency against the packed tokens of its batch, for each TP degree.

A grid per TP degree (measured by a profile, or one of the presets), linear between its points, a part for
each request of the batch, corrected online by what the StepReports say. Knows nothing of instances.

Sources: `h100-measured` is LLaDA-8B on H100s from the profiles in the TeDiServe artifact (Apache-2.0);
`h100-nvlink` is a roofline with the all-reduce bandwidth that full NVLink gives and those cards lacked.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dlmserve.control.policy.step_times import Fit, StepTime, fit
from dlmserve.errors import ConfigError

MEASURED_TOKENS = (32, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MEASURED_MS = {
    1: (12.2, 12.1, 13.2, 16.5, 22.7, 29.0, 43.7, 58.3, 92.7, 125.9, 183.8, 250.7),
    2: (11.9, 12.1, 12.4, 16.3, 21.6, 27.3, 38.6, 49.7, 74.6, 99.4, 147.4, 193.4),
    4: (12.6, 12.8, 12.6, 13.4, 15.7, 19.0, 25.7, 31.2, 46.3, 60.5, 89.8, 117.8),
}
PRESETS = ("h100-measured", "h100-nvlink")
FAR = 1e9  # tokens: beyond its last point a profile goes on, straight

# Online correction: weight of one report against its predecessors', and of the profile in reports.
FORGET = 0.995
TRUST = 0.5
STALE_REPORTS = 32  # after which the efficient batch is computed anew
USUAL = 0.98  # weight of what was usual before the newest report: tokens per request


@dataclass(frozen=True)
class Roofline:
    """A card and its links: step time of a transformer from its weights, in the notation of `step_s`."""

    flops: float = 990e12  # bfloat16, dense
    bytes_per_s: float = 3.35e12
    flop_efficiency: float = 0.65
    byte_efficiency: float = 0.85
    overhead_s: float = 1.5e-3
    link_bytes_per_s: float = 350e9
    link_latency_s: float = 8e-6

    # LLaDA-8B
    num_layers: int = 32
    layer_weights: float = 218.1e6
    head_weights: float = 0.518e9
    width: int = 4096

    def step_s(self, tp_degree: int, num_tokens: float) -> float:
        """Attention is counted over the packed batch as one sequence, as in the measured profile."""
        flops = tp_degree * self.flop_efficiency * self.flops
        bytes_per_s = tp_degree * self.byte_efficiency * self.bytes_per_s

        def linear(weights: float) -> float:
            return max(2 * num_tokens * weights / flops, 2 * weights / bytes_per_s)

        attention = 4 * num_tokens**2 * self.width / flops
        layer = linear(self.layer_weights) + attention + 2 * self._all_reduce_s(tp_degree, num_tokens)
        return self.num_layers * layer + linear(self.head_weights) + self.overhead_s

    def _all_reduce_s(self, tp_degree: int, num_tokens: float) -> float:
        if tp_degree == 1:
            return 0.0
        sent = 2 * (tp_degree - 1) / tp_degree * num_tokens * self.width * 2
        return sent / self.link_bytes_per_s + self.link_latency_s


class Curve:
    """Latency of one TP degree: a piecewise linear profile, and a line that maps it to what is observed.

    Where the number of requests in a batch is not said, it is taken to be the usual one for that many tokens.

    The line (observed = scale * profile + offset) is fitted by least squares of the relative error, with
    exponential forgetting and TRUST reports' worth of belief in the profile itself. The offset is the
    per-step overhead that profiles do not see; the scale is a machine of another speed.
    """

    def __init__(
        self,
        tokens: list[float],
        seconds: list[float],
        request_s: float = 0.0,
        tokens_per_request: float = 1.0,
    ) -> None:
        self._tokens, self._seconds = tokens, seconds
        self._last = len(tokens) - 1
        self._slopes = [0.0]  # of the piece that ends at each point
        for each in range(1, len(tokens)):
            self._slopes.append((seconds[each] - seconds[each - 1]) / (tokens[each] - tokens[each - 1]))
        self._request_s, self._tokens_per_request = request_s, tokens_per_request
        far_s = seconds[-1] + (FAR - tokens[-1]) * self._slopes[-1]
        self._grid = np.array([*tokens, FAR]), np.array([*seconds, far_s])
        self._fitted: tuple[float, float] | None = (1.0, 0.0)  # scale and offset; None: to be fitted anew
        self._num_observed = 0
        self._efficient: tuple[float, int, float] | None = None  # (excess, age, tokens)
        self._sums = (0.0,) * 5  # weights; profile; profile^2; observed; observed * profile
        for num_tokens in (tokens[0], tokens[-1]):
            profile_s = self._profile_s(num_tokens)
            self._add(profile_s, profile_s, TRUST)

    def copy(self) -> "Curve":
        """The same profile, without the corrections."""
        return Curve(self._tokens, self._seconds, self._request_s, self._tokens_per_request)

    def step_s(self, num_tokens: float, num_requests: float | None = None) -> float:
        # The most frequent question of all, here and in CostModel: what is there already is taken without a call.
        scale, offset_s = self._fitted or self._line
        return scale * self._profile_s(num_tokens, num_requests) + offset_s

    def step_s_many(self, num_tokens: np.ndarray) -> np.ndarray:
        profile_s = np.interp(num_tokens, *self._grid)
        if self._request_s:
            profile_s = profile_s + self._usual_request_s * num_tokens
        scale, offset_s = self._line
        return scale * profile_s + offset_s

    def slope(self, num_tokens: float) -> float:
        """Seconds that one more token costs at this batch."""
        scale, _ = self._line
        segment = bisect_right(self._tokens, num_tokens, 1, self._last)
        return scale * (self._slopes[segment] + self._usual_request_s)

    def points(self, like: "Curve") -> list[tuple[float, float]]:
        """(packed tokens, seconds) of the profile's grid, with the correction that `like` has by now."""
        profile = zip(self._tokens, self._seconds, strict=True)
        scale, offset_s = like._line
        return [(tokens, scale * seconds + offset_s) for tokens, seconds in profile]

    def step_times(self) -> list[StepTime]:
        """Batches of many requests and of one at each size of the grid: what `fit` makes this curve of again."""
        return [
            StepTime(tokens, requests, self.step_s(tokens, requests))
            for tokens in self._tokens
            for requests in (1.0, max(2.0, tokens / self._tokens_per_request))
        ]

    @property
    def is_observed(self) -> bool:
        return self._num_observed > 0

    def efficient_tokens(self, excess: float) -> float:
        """The smallest batch whose cost per token is at most `excess` times the least."""
        age = self._num_observed // STALE_REPORTS
        if self._efficient is None or self._efficient[:2] != (excess, age):
            per_token = self.step_s_many(self._sizes) / self._sizes
            size = float(self._sizes[int((per_token <= excess * per_token.min()).argmax())])
            self._efficient = (excess, age, size)
        return self._efficient[2]

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.geomspace(self._tokens[0], self._tokens[-1], 64)

    def tokens_within(self, seconds: float) -> float:
        """The largest batch whose step takes no longer, at most the grid's largest."""
        tokens = self._grid[0][:-1]
        return float(np.interp(seconds, self.step_s_many(tokens), tokens, left=0.0))

    def observe(self, num_tokens: float, num_requests: float, duration_s: float) -> None:
        self._num_observed += 1
        usual = self._tokens_per_request
        self._tokens_per_request = USUAL * usual + (1 - USUAL) * num_tokens / num_requests
        self._add(self._profile_s(num_tokens, num_requests), duration_s, 1.0, FORGET)
        self._fitted = None

    @property
    def _line(self) -> tuple[float, float]:
        """Scale and offset; fitted once somebody asks, as reports come far more often."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> tuple[float, float]:
        weight, x, xx, y, xy = self._sums
        determinant = weight * xx - x * x
        scale, offset_s = 1.0, 0.0
        if determinant > 0:
            scale = (weight * xy - x * y) / determinant
            offset_s = (y - scale * x) / weight
        # Neither may turn the curve around: a batch is never faster for having more tokens, or free.
        scale = max(scale, 0.02)
        return scale, max(offset_s, -0.9 * scale * self._seconds[0])

    def _add(self, profile_s: float, observed_s: float, weight: float, keep: float = 1.0) -> None:
        """`keep`: of what was there before."""
        weight /= profile_s * profile_s
        weights, x, xx, y, xy = self._sums
        self._sums = (
            keep * weights + weight,
            keep * x + weight * profile_s,
            keep * xx + weight * (profile_s * profile_s),
            keep * y + weight * observed_s,
            keep * xy + weight * (profile_s * observed_s),
        )

    @property
    def _usual_request_s(self) -> float:
        """Seconds of requests for each of their tokens, in the usual mix of spans."""
        return self._request_s / self._tokens_per_request

    def _profile_s(self, num_tokens: float, num_requests: float | None = None) -> float:
        tokens = self._tokens
        if num_tokens <= tokens[0]:
            tokens_s = self._seconds[0]
        else:
            segment = bisect_right(tokens, num_tokens, 1, self._last)
            tokens_s = self._seconds[segment] + (num_tokens - tokens[segment]) * self._slopes[segment]
        if not self._request_s:
            return tokens_s
        if num_requests is None:
            num_requests = num_tokens / self._tokens_per_request
        return tokens_s + self._request_s * num_requests


class CostModel:
    """`step_s` for every TP degree. A degree without a curve of its own takes the nearest smaller one's."""

    def __init__(self, curves: dict[int, Curve], source: str) -> None:
        self._curves = dict(sorted(curves.items()))
        self.source = source
        self._learnt: set[int] = set()

    @classmethod
    def from_preset(cls, name: str) -> "CostModel":
        """Raises ConfigError for a name that is none of PRESETS."""
        tokens = [float(n) for n in MEASURED_TOKENS]
        if name == "h100-measured":
            profile = {degree: [ms / 1000 for ms in row] for degree, row in MEASURED_MS.items()}
        elif name == "h100-nvlink":
            card = Roofline()
            profile = {degree: [card.step_s(degree, n) for n in tokens] for degree in (1, 2, 4, 8)}
        else:
            raise ConfigError(f"cost model preset is {name!r}; wanted one of: {', '.join(PRESETS)}")
        return cls({degree: Curve(tokens, _rising(seconds)) for degree, seconds in profile.items()}, name)

    @classmethod
    def from_profile(cls, profile: Mapping[str, Any]) -> "CostModel":
        """`profile`: {"source": text, "step_s": {tp_degree: [[tokens, requests, seconds], ...]}}, as JSON has it.

        Raises ConfigError for a degree with fewer than two batch sizes, and for what is no profile.
        """
        model = cls({}, "")
        try:
            for degree, points in profile["step_s"].items():
                model.learn(int(degree), [StepTime(*map(float, point)) for point in points])
            model.source = str(profile["source"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"this is no profile: {error!r}; `dlmserve profile` makes one") from error
        if not model._curves:
            raise ConfigError("the profile holds no TP degree; delete it and profile again")
        return model

    @classmethod
    def from_points(cls, points: Mapping[int, Sequence[tuple[float, float]]], source: str) -> "CostModel":
        """What `points` gave for each TP degree: (packed tokens, seconds), linear in between."""
        return cls(
            {degree: Curve([n for n, _ in each], [s for _, s in each]) for degree, each in points.items()},
            source,
        )

    def profile(self) -> dict[str, Any]:
        """What is believed by now, in the form that `from_profile` reads."""
        step_s = {
            str(degree): [list(t) for t in curve.step_times()] for degree, curve in self._curves.items()
        }
        return {"source": f"{self.source}, corrected by reports", "step_s": step_s}

    def knows(self, tp_degree: int) -> bool:
        """Whether this degree's step times were measured here; a preset's were not."""
        return tp_degree in self._learnt

    def learn(self, tp_degree: int, points: Sequence[StepTime], source: str = "") -> None:
        """Takes a degree's measured step times instead of what is believed; the first ones end a preset.

        Raises ConfigError for fewer than two batch sizes.
        """
        try:
            curve = _curve_of(fit(points))
        except ValueError as error:
            raise ConfigError(
                f"the profile of TP degree {tp_degree} has {error}: delete it and profile again"
            ) from error
        if self.source in PRESETS:
            self._curves.clear()
        self._curves[tp_degree] = curve
        self._learnt.add(tp_degree)
        self.source = source

    def step_s(self, tp_degree: int, num_tokens: float, num_requests: float | None = None) -> float:
        """Seconds of a step over `num_tokens` packed tokens, whatever the mix of step kinds.

        `num_requests` in the batch; None: as many as usual.
        """
        curve = self._curves.get(tp_degree) or self._curve(tp_degree)
        return curve.step_s(num_tokens, num_requests)

    def step_s_many(self, tp_degree: int, num_tokens: np.ndarray) -> np.ndarray:
        """The same for an array of batches, any shape."""
        return self._curve(tp_degree).step_s_many(num_tokens)

    def points(self, tp_degree: int) -> list[tuple[float, float]]:
        """The curve of a TP degree, as `from_points` takes it. One never seen is corrected as its neighbour."""
        curve = self._curve(tp_degree)
        seen = [degree for degree in self._curves if self._curves[degree].is_observed]
        if curve.is_observed or not seen:
            return curve.points(like=curve)
        return curve.points(like=self._curves[min(seen, key=lambda degree: abs(degree - tp_degree))])

    def step_s_each(self, tp_degrees: Sequence[int], num_tokens: np.ndarray) -> np.ndarray:
        """The same for batches [n] of instances with these TP degrees [n]."""
        distinct = set(tp_degrees)
        if len(distinct) == 1:
            return self.step_s_many(tp_degrees[0], num_tokens)
        step_s = {degree: self.step_s_many(degree, num_tokens) for degree in distinct}
        return np.array([step_s[degree][at] for at, degree in enumerate(tp_degrees)])

    def line(self, tp_degree: int, num_tokens: float) -> tuple[float, float]:
        """(seconds of a step, seconds per token) of the tangent at this batch."""
        curve = self._curve(tp_degree)
        slope = curve.slope(num_tokens)
        return curve.step_s(num_tokens) - slope * num_tokens, slope

    def efficient_tokens(self, tp_degree: int, excess: float) -> float:
        """The smallest batch whose seconds per token are at most `excess` times the least of all batches."""
        return self._curve(tp_degree).efficient_tokens(excess)

    def tokens_within(self, tp_degree: int, seconds: float) -> float:
        """The largest batch known whose step takes no longer; 0 where even the smallest does."""
        return self._curve(tp_degree).tokens_within(seconds)

    def observe(self, tp_degree: int, num_tokens: float, num_requests: float, duration_s: float) -> None:
        """Takes a step's measured wall time in: its duration and the busy instance's gap before it."""
        if num_tokens > 0 and num_requests > 0 and duration_s > 0:
            self._own_curve(tp_degree).observe(num_tokens, num_requests, duration_s)

    def _curve(self, tp_degree: int) -> Curve:
        found = self._curves.get(tp_degree)
        return found or self._curves[self._nearest(tp_degree)]

    def _own_curve(self, tp_degree: int) -> Curve:
        if tp_degree not in self._curves:
            self._curves[tp_degree] = self._curves[self._nearest(tp_degree)].copy()
        return self._curves[tp_degree]

    def _nearest(self, tp_degree: int) -> int:
        smaller = [degree for degree in self._curves if degree <= tp_degree]
        return max(smaller) if smaller else min(self._curves)


def _curve_of(found: Fit) -> Curve:
    return Curve(found.tokens, found.seconds, found.request_s, found.tokens_per_request)


def _rising(seconds: list[float]) -> list[float]:
    return np.maximum.accumulate(seconds).tolist()
