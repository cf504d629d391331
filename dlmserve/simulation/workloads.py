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
    """`prompt` and `output` in tokens; `answer`: output tokens before the first EOS (output: it never comes)."""

    arrived_at: float
    prompt: int
    output: int
    answer: int


def poisson_jobs(num_jobs: int, rps: float, prompt: int, output: int, early: bool, seed: int) -> list[Job]:
    """Equal requests. `early`: answers end somewhere before their output does."""
    rng = np.random.default_rng([seed, 1])
    times = np.cumsum(rng.exponential(1 / rps, num_jobs))
    return _jobs(times, np.full(num_jobs, prompt), np.full(num_jobs, output), early, rng)


def day_jobs(peak_rps: float, duration_s: float, early: bool, seed: int) -> list[Job]:
    """The average BurstGPT day squeezed into `duration_s`, Poisson within each hour; ShareGPT lengths."""
    rng = np.random.default_rng([seed, 2])
    hour_s = duration_s / 24
    times = []
    for hour, rate in enumerate(read_column("burstgpt_hourly.csv", "relative_rate")):
        num = rng.poisson(peak_rps * rate * hour_s)
        times.append(hour * hour_s + np.sort(rng.uniform(0, hour_s, num)))
    at = np.concatenate(times)
    prompts, outputs = _sharegpt_lengths(len(at), rng)
    return _jobs(at, prompts, outputs, early, rng)


def day_sample(num_jobs: int, early: bool, seed: int) -> list[Job]:
    """Requests with the lengths of `day_jobs`, all at once."""
    rng = np.random.default_rng([seed, 3])
    return _jobs(np.zeros(num_jobs), *_sharegpt_lengths(num_jobs, rng), early, rng)


def read_column(file: str, column: str) -> list[float]:
    lines = (DATA / file).read_text(encoding="utf-8").splitlines()
    return [float(row[column]) for row in csv.DictReader(lines)]


def _sharegpt_lengths(num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and outputs, drawn independently from the recorded quantiles; outputs in whole blocks that fit."""
    file = "sharegpt_lengths.csv"
    quantiles = read_column(file, "quantile")
    prompts = np.interp(rng.uniform(size=num), quantiles, read_column(file, "input_tokens"))
    outputs = np.interp(rng.uniform(size=num), quantiles, read_column(file, "output_tokens"))
    prompts = np.ceil(prompts).astype(int)
    blocks = np.minimum(np.ceil(outputs / BLOCK_LENGTH).astype(int), (MAX_LENGTH - prompts) // BLOCK_LENGTH)
    return prompts, blocks * BLOCK_LENGTH


def _jobs(
    times: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, early: bool, rng: np.random.Generator
) -> list[Job]:
    share = rng.uniform(SHORTEST_ANSWER, 1, len(times)) if early else np.ones(len(times))
    answers = np.maximum(1, (share * outputs).astype(int))
    return [Job(*map(_plain, row)) for row in zip(times, prompts, outputs, answers, strict=True)]


def _plain(value: np.generic) -> float | int:
    return value.item()
