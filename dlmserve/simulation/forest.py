"""A trained CatBoost model's trees, evaluated in numpy: the same values, without the cost of a call.

The simulator predicts for a handful of requests at a time, tens of thousands of times; CatBoost takes 0.6 ms
for each call, whatever its size. Knows nothing of what is predicted.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from dlmserve.control.policy.predictions import FEATURES, OUTPUT_LENGTH
from dlmserve.control.policy.step_predictor import CatBoostPredictor

MAX_DEPTH = 8  # splits of a tree: they make one byte, the index of its leaf


class Forest:
    """A StepPredictor that predicts what `trained` does."""

    def __init__(self, trained: CatBoostPredictor) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.json"
            trained.save(file)
            model = json.loads(file.read_text(encoding="utf-8"))
        trees = model["oblivious_trees"]
        self._scale, (self._bias,) = model["scale_and_bias"]
        # A tree of fewer splits is filled up with some that no value passes.
        columns = np.zeros((len(trees), MAX_DEPTH), dtype=np.intp)
        borders = np.full((len(trees), MAX_DEPTH), np.inf, dtype=np.float32)
        self._leaves = np.zeros((len(trees), 2**MAX_DEPTH))
        for row, tree in enumerate(trees):
            for place, split in enumerate(tree["splits"]):
                columns[row, place] = split["float_feature_index"]
                borders[row, place] = split["border"]
            self._leaves[row, : len(tree["leaf_values"])] = tree["leaf_values"]
        self._first_leaf = np.arange(len(trees)) * 2**MAX_DEPTH
        # The threshold is the last input. Its splits and the features' set different bits of a leaf's index.
        of_threshold = columns == len(FEATURES)
        self._columns = np.where(of_threshold, 0, columns).ravel()
        self._borders = np.where(of_threshold, np.float32(np.inf), borders).ravel()
        self._threshold_borders = np.where(of_threshold, borders, np.float32(np.inf)).ravel()

    def predict(self, features: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
        by_features = _bits(features.astype(np.float32)[:, self._columns] > self._borders)
        by_threshold = _bits(thresholds.astype(np.float32)[:, None] > self._threshold_borders)
        leaf = by_features[:, None] + by_threshold
        values = self._leaves.ravel()[leaf + self._first_leaf].sum(axis=2)
        share = self._scale * values + self._bias
        return np.maximum(share * features[:, OUTPUT_LENGTH, None], 1.0)


def _bits(passed: np.ndarray) -> np.ndarray:
    """One byte for each row and tree of bool [n, trees * MAX_DEPTH]."""
    return np.packbits(passed, axis=1, bitorder="little")
