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


class Forest:
    """A StepPredictor that predicts what `trained` does."""

    def __init__(self, trained: CatBoostPredictor) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.json"
            trained.save(file)
            model = json.loads(file.read_text(encoding="utf-8"))
        trees = model["oblivious_trees"]
        self._scale, (self._bias,) = model["scale_and_bias"]
        depth = max(len(tree["splits"]) for tree in trees)
        # A tree of fewer splits is filled up with some that no value passes.
        columns = np.zeros((depth, len(trees)), dtype=np.intp)
        borders = np.full((depth, len(trees)), np.inf, dtype=np.float32)
        self._leaves = np.zeros((len(trees), 2**depth))
        for number, tree in enumerate(trees):
            for place, split in enumerate(tree["splits"]):
                columns[place, number] = split["float_feature_index"]
                borders[place, number] = split["border"]
            self._leaves[number, : len(tree["leaf_values"])] = tree["leaf_values"]
        self._first_leaf = np.arange(len(trees))[:, None] * 2**depth
        # Of a split's outcome in a leaf's index.
        self._weights = (1 << np.arange(depth, dtype=np.uint8))[:, None, None]
        # The threshold is the last input. Its splits and the features' set different bits of a leaf's index.
        of_threshold = columns == len(FEATURES)
        self._columns = np.where(of_threshold, 0, columns)
        self._borders = np.where(of_threshold, np.float32(np.inf), borders)[:, :, None]
        self._threshold_borders = np.where(of_threshold, borders, np.float32(np.inf))[:, :, None]
        self._leaves_at: dict[bytes, np.ndarray] = {}

    def predict(self, features: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
        columns = np.ascontiguousarray(features.T, np.float32)
        passed = columns.take(self._columns, axis=0) > self._borders
        leaf = self._leaf(passed) + self._first_leaf
        values = self._leaves_of(thresholds).take(leaf, axis=0).sum(axis=0)
        share = self._scale * values + self._bias
        return np.maximum(share * features[:, OUTPUT_LENGTH, None], 1.0)

    def _leaf(self, passed: np.ndarray) -> np.ndarray:
        """Each tree's leaf by the splits that are passed, bool [depth, trees, n] -> uint8 [trees, n]."""
        return (passed.view(np.uint8) * self._weights).sum(axis=0, dtype=np.uint8)

    def _leaves_of(self, thresholds: np.ndarray) -> np.ndarray:
        """Values [leaves, T] by the leaf that the features alone lead to, all trees in a row."""
        key = thresholds.tobytes()
        if key not in self._leaves_at:
            fixed = self._leaf(thresholds.astype(np.float32) > self._threshold_borders)  # [trees, T]
            reached = fixed[:, None] | np.arange(self._leaves.shape[1])[:, None]
            values = np.take_along_axis(self._leaves[:, :, None], reached, axis=1)
            self._leaves_at[key] = values.reshape(-1, len(thresholds))
        return self._leaves_at[key]
