"""The step predictor that goes by hidden states alone: blocks until the end times steps per block.

Owns that formula. What is read from hidden states arrives as two features (see predictions.py); before anything
is read the usual number of blocks and steps holds.
"""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from dlmserve.control.policy.predictions import HIDDEN_BLOCKS, HIDDEN_STEPS
from dlmserve.errors import ConfigError

ARRAYS = ("thresholds", "steps_per_block", "usual_blocks")


class HiddenStatePredictor:
    """A StepPredictor. `steps_per_block` [T] at `thresholds` [T], ascending; `usual_blocks` of an answer."""

    def __init__(self, thresholds: np.ndarray, steps_per_block: np.ndarray, usual_blocks: float) -> None:
        self.thresholds, self.steps_per_block, self.usual_blocks = thresholds, steps_per_block, usual_blocks

    @classmethod
    def load(cls, path: Path) -> "HiddenStatePredictor":
        """From the network's file. Raises ConfigError."""
        try:
            with safe_open(path, "numpy") as file:
                thresholds, steps, blocks = (file.get_tensor(name) for name in ARRAYS)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"hidden-state predictor {path} cannot be read: {error}; train it again"
            ) from error
        return cls(thresholds, steps, float(blocks[0]))

    def arrays(self) -> dict[str, np.ndarray]:
        """What `load` finds beside the network's own tensors; float32."""
        values = (self.thresholds, self.steps_per_block, np.array([self.usual_blocks]))
        return {name: np.asarray(value, np.float32) for name, value in zip(ARRAYS, values, strict=True)}

    def predict(self, features: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
        """What was read counts steps at the highest trained threshold; others go as their blocks do."""
        per_block = np.interp(thresholds, self.thresholds, self.steps_per_block)
        blocks, steps = features[:, HIDDEN_BLOCKS], features[:, HIDDEN_STEPS]
        blocks = np.where(np.isnan(blocks), self.usual_blocks - 1, blocks)
        in_block = np.where(np.isnan(steps), 1.0, steps / self.steps_per_block[-1])
        return np.maximum((blocks + in_block)[:, None] * per_block, 1.0)
