"""Which requests arrive when: Poisson arrivals and squeezed days, fixed and recorded lengths.

Numbers only; deterministic for a seed. Knows nothing of servers.
"""

import csv
from dataclasses import dataclass

import numpy as np

from dlmserve.simulation.unmasking import DATA

BLOCK_LENGTH = 32
MAX_LENGTH = 4096  # of a canvas
SHORTEST_ANSWER = 0.25  # early answers end, evenly spread, at this share of the output or later


@dataclass(frozen=True)
class Job:
    """`prompt`, `output` in tokens; `answer`: output tokens before the first EOS (output: it never comes)."""

    arrived_at: float
    prompt: int
    output: int
    answer: int


def poisson_times(num_jobs: int, rps: float, rng: np.random.Generator) -> np.ndarray:
    """Arrival times [num_jobs], ascending."""
    return np.cumsum(rng.exponential(1 / rps, num_jobs))


def day_times(peak_rps: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """The average BurstGPT day squeezed into `duration_s`, Poisson within each of its hours; ascending."""
    hour_s = duration_s / 24
    times = []
    for hour, rate in enumerate(read_column("burstgpt_hourly.csv", "relative_rate")):
        num = rng.poisson(peak_rps * rate * hour_s)
        times.append(hour * hour_s + np.sort(rng.uniform(0, hour_s, num)))
    return np.concatenate(times)


def make_jobs(
    times: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, early: bool, rng: np.random.Generator
) -> list[Job]:
    """`early`: answers end somewhere before their output does."""
    share = rng.uniform(SHORTEST_ANSWER, 1, len(times)) if early else np.ones(len(times))
    answers = np.maximum(1, (share * outputs).astype(int))
    columns = (times.tolist(), prompts.tolist(), outputs.tolist(), answers.tolist())
    return list(map(Job, *columns))


def read_column(file: str, column: str) -> list[float]:
    lines = (DATA / file).read_text(encoding="utf-8").splitlines()
    return [float(row[column]) for row in csv.DictReader(lines)]


def sharegpt_lengths(num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and outputs, drawn independently from the recorded quantiles; outputs in whole blocks."""
    file = "sharegpt_lengths.csv"
    quantiles = read_column(file, "quantile")
    prompts = np.interp(rng.uniform(size=num), quantiles, read_column(file, "input_tokens"))
    outputs = np.interp(rng.uniform(size=num), quantiles, read_column(file, "output_tokens"))
    prompts = np.ceil(prompts).astype(int)
    blocks = np.minimum(np.ceil(outputs / BLOCK_LENGTH).astype(int), (MAX_LENGTH - prompts) // BLOCK_LENGTH)
    return prompts, blocks * BLOCK_LENGTH
