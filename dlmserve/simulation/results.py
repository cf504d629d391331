"""What a simulation or a load test yields: counts, latencies, quality, and the JSON schema of both.

The quality proxy: a token unmasked at threshold g is worth the accuracy measured when all tokens are
unmasked at g; a request's accuracy is the mean over its tokens. Held against the measured mixes of 0.9 and
0.6 by steps, it is within 1.0 points (accuracy at the mean threshold would be up to 2.7 off, as the curve
bends).
"""

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from dlmserve.control.policy.request import Summary
from dlmserve.simulation.unmasking import read_table


class QualityProxy(dict[float, float]):
    """Accuracy (0..1) of GSM8K with LLaDA-8B by threshold, linear between the measured thresholds."""

    def __init__(self) -> None:
        super().__init__()
        table = read_table("accuracy_pct")
        self._thresholds = sorted(table)
        self._accuracies = [table[threshold] / 100 for threshold in self._thresholds]

    def __missing__(self, threshold: float) -> float:
        self[threshold] = float(np.interp(threshold, self._thresholds, self._accuracies))
        return self[threshold]


@dataclass(slots=True)
class Outcome:
    """One request's end. `latency_s` is None where it was dropped while it waited."""

    arrived_at: float
    slo_s: float
    latency_s: float | None
    num_tokens: int = 0
    mean_threshold: float = 0.0
    accuracy: float | None = 0.0  # None: not known

    @property
    def slo_met(self) -> bool:
        return self.latency_s is not None and self.latency_s <= self.slo_s


@dataclass
class Ledger:
    """Collects while the simulation runs; `decision_s`: how long the scheduler took for each StepReport."""

    quality: QualityProxy = field(default_factory=QualityProxy)
    outcomes: list[Outcome] = field(default_factory=list)
    decision_s: array = field(default_factory=lambda: array("d"))
    num_migrations: int = 0
    num_reconfigurations: int = 0
    num_tokens: int = 0
    ended_at: float = 0.0
    # Per live request: accuracy times tokens.
    _worth: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def on_step(self, request: int, threshold: float, num_unmasked: int) -> None:
        self._worth[request] += self.quality[threshold] * num_unmasked

    def on_finish(self, request: int, arrived_at: float, slo_s: float, summary: Summary) -> None:
        num_tokens = summary.num_unmasked
        self.num_tokens += num_tokens
        accuracy = self._worth.pop(request) / num_tokens
        threshold = summary.mean_threshold or 0.0
        self.outcomes.append(Outcome(arrived_at, slo_s, summary.latency_s, num_tokens, threshold, accuracy))
        self.ended_at = max(self.ended_at, arrived_at + summary.latency_s)

    def on_drop(self, request: int, arrived_at: float, slo_s: float) -> None:
        self._worth.pop(request, None)
        self.outcomes.append(Outcome(arrived_at, slo_s, None))

    def result(self, start_s: float = 0.0, end_s: float = float("inf")) -> dict:
        """Figures of the requests that arrived in start_s .. end_s; see api.md for the names."""
        outcomes = [each for each in self.outcomes if start_s <= each.arrived_at < end_s]
        served = [each for each in outcomes if each.latency_s is not None]
        num_tokens = sum(each.num_tokens for each in served)
        thresholds = sum(each.mean_threshold * each.num_tokens for each in served)
        return {
            "requests": len(outcomes),
            "dropped": len(outcomes) - len(served),
            "attainment": _mean([each.slo_met for each in outcomes if np.isfinite(each.slo_s)]),
            "accuracy": _mean([each.accuracy for each in served if each.accuracy is not None]),
            "mean_threshold": thresholds / num_tokens if num_tokens else None,
            "latency_s": _latency([each.latency_s for each in served if each.latency_s is not None]),
            "tokens_per_s": num_tokens / self.ended_at if self.ended_at else 0.0,
            "migrations": self.num_migrations,
            "reconfigurations": self.num_reconfigurations,
            "decision_us": _percentiles([s * 1e6 for s in self.decision_s], (50, 99)),
        }


def report(
    ledger: Ledger,
    scenario: str,
    policy: str,
    seed: int,
    rps: float,
    overhead_ms: float | None,
    options: dict,
) -> dict:
    """One run as `simulate --json` and `bench --json` write it. `overhead_ms`: of a step, beyond its own time."""
    head = {"scenario": scenario, "policy": policy, "seed": seed, "rps": rps}
    return head | ledger.result() | {"overhead_ms": overhead_ms, "options": options}


def _latency(latencies: list[float]) -> dict:
    mean = _mean(latencies)
    return {"mean": mean, **_percentiles(latencies, (50, 95, 99))}


def _mean(values: list) -> float | None:
    return float(np.mean(values)) if values else None


def _percentiles(values: list[float], percents: tuple[int, ...]) -> dict[str, float | None]:
    found = np.percentile(values, percents) if values else [None] * len(percents)
    return {f"p{p}": None if x is None else float(x) for p, x in zip(percents, found, strict=True)}
