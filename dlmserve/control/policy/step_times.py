"""From measured step times to a curve: seconds of a batch's tokens, and of each request in it.

A packed batch costs what its tokens cost, and a little for each request (its own attention call, its own
rows of the head): on GPUs next to nothing, with a small model on a CPU as much as its tokens. Pure array
functions; knows nothing of who measured.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_KNOTS = 8
PULL = 0.02


class StepTime(NamedTuple):
    """One measured batch size."""

    num_tokens: float  # packed tokens
    num_requests: float
    seconds: float


class Fit(NamedTuple):
    """seconds = (linear between `tokens`, `seconds`) + request_s * requests."""

    tokens: list[float]  # ascending
    seconds: list[float]  # never falling
    request_s: float
    tokens_per_request: float  # usual: the mean over the measured batches


def fit(points: Sequence[StepTime]) -> Fit:
    """Least squares of the relative error; at least two batch sizes are wanted (ValueError)."""
    tokens, requests, seconds = np.array(points, dtype=float).reshape(-1, 3).T
    sizes = np.unique(tokens)
    if len(sizes) < 2:
        raise ValueError(f"{len(sizes)} batch sizes; wanted at least 2")
    knots = sizes
    if len(sizes) > MAX_KNOTS:
        knots = np.geomspace(sizes[0], sizes[-1], MAX_KNOTS)
    hats = np.array([np.interp(tokens, knots, hat) for hat in np.eye(len(knots))]).T
    design = np.column_stack([hats, requests]) / seconds[:, None]
    # What the measurements leave open: a knot is held by its neighbours' line, and tokens pay before requests.
    bends = np.diff(np.eye(len(knots)), n=2, axis=0)
    pull = np.zeros((len(bends) + 1, len(knots) + 1))
    pull[:-1, :-1], pull[-1, -1] = bends, 15 * requests.mean()
    system = np.concatenate([design, PULL / seconds.mean() * pull])
    wanted = np.concatenate([np.ones(len(seconds)), np.zeros(len(pull))])
    found = np.linalg.lstsq(system, wanted, rcond=None)[0]
    if found[-1] < 0:
        found = np.append(np.linalg.lstsq(system[:, :-1], wanted, rcond=None)[0], 0.0)
    floor = 0.05 * seconds.min()
    rising = np.maximum.accumulate(np.maximum(found[:-1], floor))
    return Fit(knots.tolist(), rising.tolist(), float(found[-1]), float((tokens / requests).mean()))
