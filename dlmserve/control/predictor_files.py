"""Which step predictor serves a model: where trained ones are kept, and which kinds are in a folder.

Owns the search (a folder that was named, the model's folder, the user's cache folder) and the file names. Knows
nothing of how predictors work or are trained.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dlmserve.config import PredictorKind, ServerConfig
from dlmserve.control.policy.hidden_predictor import HiddenStatePredictor
from dlmserve.control.policy.policy import Policy
from dlmserve.control.policy.predictions import StepPredictor
from dlmserve.control.policy.step_predictor import CatBoostPredictor
from dlmserve.errors import ConfigError

IN_MODEL_FOLDER = "step_predictor"
TREES, TREES_HIDDEN, NETWORK, ERRORS = "trees.cbm", "trees-hidden.cbm", "hidden.safetensors", "errors.json"
# What each kind needs, best first.
FILES: dict[PredictorKind, tuple[str, ...]] = {
    "catboost+hidden": (TREES_HIDDEN, NETWORK),
    "catboost": (TREES,),
    "hidden": (NETWORK,),
}


@dataclass(frozen=True)
class PredictorChoice:
    """`folder` is None for the server's own history."""

    kind: PredictorKind
    folder: Path | None = None

    def __str__(self) -> str:
        return f"{self.kind}, from {self.folder}" if self.folder else "the server's own history"

    @property
    def hidden_reader(self) -> str:
        """The file that rank 0 of each instance reads hidden states with; "" for none."""
        return str(self.folder / NETWORK) if self.folder and NETWORK in FILES[self.kind] else ""

    def load(self) -> StepPredictor | None:
        """None for the history. Raises ConfigError for a file that cannot be used."""
        if self.folder is None:
            return None
        file = self.folder / FILES[self.kind][0]
        return HiddenStatePredictor.load(file) if self.kind == "hidden" else CatBoostPredictor.load(file)


def choose_predictor(config: ServerConfig, policy: Policy, model_folder: str) -> PredictorChoice:
    """Raises ConfigError where what the settings name is not there."""
    wanted = config.step_predictor_kind
    if wanted == "history" or not policy.wants_predictions:
        return PredictorChoice("history")
    folders = [Path(model_folder) / IN_MODEL_FOLDER, cached_folder(model_folder)]
    if config.step_predictor is not None:
        folders = [Path(config.step_predictor)]
    for folder in folders:
        for kind, names in FILES.items():
            if wanted in ("auto", kind) and all((folder / name).is_file() for name in names):
                return PredictorChoice(kind, folder)
    if wanted == "auto" and config.step_predictor is None:
        return PredictorChoice("history")
    raise ConfigError(
        f"no step predictor of kind '{wanted}' in {' or '.join(map(str, folders))}; make one with: "
        f"dlmserve train-predictor --model {config.model}"
    )


def cached_folder(model_folder: str) -> Path:
    """Where `train-predictor` leaves a model's predictor unless told otherwise."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlmserve" / "step_predictors"
    name = re.sub(r"\W+", "-", Path(model_folder).name).strip("-") or "model"
    return root / f"{name}-{hashlib.sha256(model_folder.encode()).hexdigest()[:12]}"
