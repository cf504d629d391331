"""From recorded decodings to a model's step predictors and their errors: the order of the learning.

Requests are split 70 / 15 / 15: to learn from, to stop the network's training by, to measure on. The trees learn from
the first two parts, with what networks read that had not seen the request; what is stored learns from all of them.
"""

from dataclasses import dataclass

import numpy as np

from dlmserve.checkpoint import ModelInfo
from dlmserve.control.policy.hidden_predictor import HiddenStatePredictor
from dlmserve.control.policy.step_predictor import (
    COLUMNS,
    CatBoostPredictor,
    errors_by_features,
    errors_by_refresh,
    errors_of,
    predict_rows,
)
from dlmserve.control.policy.step_table import StepTable
from dlmserve.training.courses import Course, step_table
from dlmserve.training.hidden import hidden_table, read_unseen, train_network, with_outlooks
from dlmserve.worker.hidden_reader import HiddenNetwork

SHARES = (0.70, 0.15)  # the rest is held out
MIN_RECOMPUTES = 100  # fewer recompute steps teach a network nothing


@dataclass(frozen=True)
class Learned:
    """The last three are None where there were too few recompute steps. report: errors, JSON types."""

    report: dict
    trees: CatBoostPredictor
    trees_hidden: CatBoostPredictor | None = None
    network: HiddenNetwork | None = None
    hidden: HiddenStatePredictor | None = None


def learn(courses: list[Course], info: ModelInfo, seed: int) -> Learned:
    requests = np.unique([course.request for course in courses])
    np.random.default_rng(seed).shuffle(requests)
    ends = np.rint(np.cumsum(SHARES) * len(requests)).astype(int)
    known, validation, held_out = np.split(requests, ends)
    seen = np.concatenate((known, validation))
    hidden = hidden_table(courses)
    if len(hidden.requests) < MIN_RECOMPUTES:
        table = step_table(courses, info)
        return Learned(_report(table, held_out, seed), CatBoostPredictor.train(table, seed=seed))
    network = train_network(hidden.of(known), hidden.of(validation), seed)
    table = step_table(with_outlooks(courses, read_unseen(network, hidden, seen, seed)), info)
    alone = hidden_alone([course for course in courses if course.request in set(seen.tolist())])
    return Learned(
        _report(table, held_out, seed, alone),
        CatBoostPredictor.train(table, seed=seed),
        CatBoostPredictor.train(table, COLUMNS, seed),
        network,
        alone,
    )


def hidden_alone(courses: list[Course]) -> HiddenStatePredictor:
    """Steps per block at each threshold, and blocks per answer."""
    thresholds = np.unique([course.threshold for course in courses])
    per_block = []
    for threshold in thresholds:
        at = [course for course in courses if course.threshold == threshold]
        per_block.append(sum(len(course.steps) for course in at) / sum(_num_blocks(course) for course in at))
    usual_blocks = np.mean([_num_blocks(course) for course in courses])
    return HiddenStatePredictor(thresholds, np.array(per_block), float(usual_blocks))


def _num_blocks(course: Course) -> int:
    return course.steps[-1].block + 1


def _report(
    table: StepTable, held_out: np.ndarray, seed: int, alone: HiddenStatePredictor | None = None
) -> dict:
    """Errors of predictors trained on the other requests, over the steps of those `held_out`."""
    out = np.isin(table.requests, held_out)
    seen, unseen = table.select(~out), table.select(out)
    by_features = errors_by_features(seen, unseen, seed)
    if alone:
        by_features["hidden states alone"] = errors_of(predict_rows(alone, unseen), unseen)
    best = CatBoostPredictor.train(seen, COLUMNS, seed) if alone else CatBoostPredictor.train(seen, seed=seed)
    return {
        "requests": {"seen": len(np.unique(seen.requests)), "held_out": len(held_out)},
        "steps": {"seen": len(seen.steps_left), "held_out": len(unseen.steps_left)},
        "by_features": {name: errors._asdict() for name, errors in by_features.items()},
        "by_refresh": {str(tokens): error for tokens, error in errors_by_refresh(best, unseen).items()},
    }
