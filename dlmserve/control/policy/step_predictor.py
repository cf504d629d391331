"""The learned step predictor: gradient-boosted trees over a request's progress, one model for all thresholds.

Owns the regression and its error figures. Knows nothing of where the rows come from (step_table.py) or where
predictions run. catboost is imported when it is first needed: it takes half a second.

Source: TeDiServe (arXiv 2606.29094), section 4 and appendix A: the target is the remaining steps over the
output length, one row per executed step of 100 requests at every candidate threshold.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dlmserve.control.policy.predictions import FEATURES, HIDDEN_BLOCKS, OUTPUT_LENGTH, StepPredictor
from dlmserve.control.policy.step_table import StepTable
from dlmserve.errors import ConfigError

if TYPE_CHECKING:
    from catboost import CatBoostRegressor

COLUMNS = (*FEATURES, "threshold")
LENGTH = ("output_length",)
PROGRESS = (*LENGTH, "step", "unmasked", "block", "unmasked_in_block", "threshold")
PUBLISHED = (*PROGRESS, *(name for name in FEATURES if name.startswith("confidence")))
WITHOUT_HIDDEN = tuple(name for name in COLUMNS if not name.startswith("hidden"))
FEATURE_SETS = {
    "output length": LENGTH,
    "+ progress": PROGRESS,
    "+ confidence": PUBLISHED,
    "+ confidence, hidden states": (*PUBLISHED, "hidden_blocks", "hidden_steps"),
    "+ confidence, prompt length, end": WITHOUT_HIDDEN,
    "all": COLUMNS,
}
REFRESH_TOKENS = (1, 2, 4, 8, 16, 32)
NUM_TREES, DEPTH, LEARNING_RATE = 200, 6, 0.1


class CatBoostPredictor:
    """A StepPredictor; made by `train` or `load`."""

    def __init__(self, model: "CatBoostRegressor") -> None:
        self._model = model

    @classmethod
    def train(
        cls, table: StepTable, columns: tuple[str, ...] = WITHOUT_HIDDEN, seed: int = 0
    ) -> "CatBoostPredictor":
        """Least squares on `columns` only; a higher threshold never means fewer steps."""
        from catboost import CatBoostRegressor

        ignored = [i for i, name in enumerate(COLUMNS) if name not in columns]
        model = CatBoostRegressor(
            iterations=NUM_TREES,
            depth=DEPTH,
            learning_rate=LEARNING_RATE,
            ignored_features=ignored,
            monotone_constraints={} if "threshold" not in columns else {len(FEATURES): 1},
            random_seed=seed,
            thread_count=1,  # the same trees on every machine
            verbose=False,
            allow_writing_files=False,
        )
        model.fit(table.inputs, table.steps_left / table.features[:, OUTPUT_LENGTH])
        return cls(model)

    @classmethod
    def load(cls, path: Path) -> "CatBoostPredictor":
        """Raises ConfigError where there is no such model, one of other features, or no catboost."""
        try:
            from catboost import CatBoostError, CatBoostRegressor
        except ImportError as error:
            raise ConfigError(
                f"step predictor {path} needs catboost, which is not installed: pip install catboost, "
                "or --step-predictor-kind history"
            ) from error

        model = CatBoostRegressor()
        try:
            model.load_model(str(path))
        except CatBoostError as error:
            raise ConfigError(f"step predictor {path} cannot be read: {error}; train it again") from error
        num_features = len(model.feature_names_ or ())
        if num_features != len(COLUMNS):
            raise ConfigError(
                f"step predictor {path} has {num_features} features; wanted {len(COLUMNS)}: train it again"
            )
        return cls(model)

    def save(self, path: Path) -> None:
        """As JSON where the file's name ends so, else in CatBoost's own form."""
        self._model.save_model(str(path), format="json" if path.suffix == ".json" else "cbm")

    def predict(self, features: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
        """`features` [n, F], `thresholds` [T] -> steps left [n, T], at least 1; one call for all."""
        num, num_thresholds = len(features), len(thresholds)
        rows = np.repeat(features, num_thresholds, axis=0)
        inputs = np.column_stack((rows, np.tile(thresholds, num)))
        share = self._model.predict(inputs, thread_count=1).reshape(num, num_thresholds)
        return np.maximum(share * features[:, OUTPUT_LENGTH, None], 1.0)


def error_ratio(predicted: np.ndarray, actual: np.ndarray) -> float:
    """Weighted absolute percentage error: sum |predicted - actual| / sum actual."""
    return float(np.abs(predicted - actual).sum() / actual.sum())


def predict_rows(predictor: StepPredictor, table: StepTable) -> np.ndarray:
    """Steps left [n] of each row at its own threshold."""
    found = np.empty(len(table.thresholds))
    for threshold in np.unique(table.thresholds):
        rows = table.thresholds == threshold
        found[rows] = predictor.predict(table.features[rows], np.array([threshold]))[:, 0]
    return found


def held_between(predicted: np.ndarray, table: StepTable, num_tokens: int) -> np.ndarray:
    """`predicted` [n] where it is renewed only after `num_tokens` unmasked tokens; each step takes one off."""
    held = predicted.copy()
    done, unmasked = table.steps_done, table.num_unmasked
    last = 0
    for row in range(len(held)):
        if done[row] == 0 or unmasked[row] - unmasked[last] >= num_tokens:
            last = row
        held[row] = max(predicted[last] - (done[row] - done[last]), 1.0)
    return held


class Errors(NamedTuple):
    """Error ratio of rows after a step (those of the published figures), and of rows on arrival."""

    after_step: float
    on_arrival: float


def errors_of(predicted: np.ndarray, table: StepTable) -> Errors:
    started, left = table.started, table.steps_left
    return Errors(*(error_ratio(predicted[rows], left[rows]) for rows in (started, ~started)))


def errors_by_features(train: StepTable, held_out: StepTable, seed: int = 0) -> dict[str, Errors]:
    """On `held_out`, of a predictor for each set of features."""
    errors = {}
    for name, columns in FEATURE_SETS.items():
        if "hidden_blocks" in columns and np.isnan(train.features[:, HIDDEN_BLOCKS]).all():
            continue
        if np.ptp(train.inputs[:, [COLUMNS.index(column) for column in columns]], axis=0).any():
            predicted = predict_rows(CatBoostPredictor.train(train, columns, seed), held_out)
        else:  # nothing to tell rows apart by
            predicted = np.full(len(held_out.steps_left), train.steps_left.mean())
        errors[name] = errors_of(predicted, held_out)
    return errors


def errors_by_refresh(predictor: StepPredictor, held_out: StepTable) -> dict[int, float]:
    """After a step, by the number of unmasked tokens between two predictions."""
    predicted = predict_rows(predictor, held_out)
    return {
        tokens: errors_of(held_between(predicted, held_out, tokens), held_out).after_step
        for tokens in REFRESH_TOKENS
    }
