"""Which step predictor a server takes: what was named, else the model's, else the cache's, else its history."""

from pathlib import Path

import pytest

from dlmserve.config import PredictorKind, ServerConfig
from dlmserve.control.policy.policies import make_policy
from dlmserve.control.predictor_files import (
    NETWORK,
    TREES,
    TREES_HIDDEN,
    PredictorChoice,
    cached_folder,
    choose_predictor,
)
from dlmserve.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder without a predictor, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "model"


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def choose(model: Path, kind: PredictorKind = "auto", folder: Path | None = None) -> PredictorChoice:
    named = None if folder is None else str(folder)
    config = ServerConfig(policy="dlmserve", step_predictor=named, step_predictor_kind=kind)
    return choose_predictor(config, make_policy(config), str(model))


def test_without_a_trained_one_the_history_predicts(model: Path) -> None:
    assert choose(model) == PredictorChoice("history")
    assert choose(model).load() is None


def test_the_models_own_comes_before_the_caches_and_a_named_one_before_both(model: Path) -> None:
    cached = put(cached_folder(str(model)), TREES)
    assert choose(model) == PredictorChoice("catboost", cached)
    own = put(model / "step_predictor", TREES)
    assert choose(model) == PredictorChoice("catboost", own)
    named = put(model.parent / "named", TREES)
    assert choose(model, folder=named) == PredictorChoice("catboost", named)


def test_auto_takes_the_best_kind_and_a_kind_can_be_asked_for(model: Path) -> None:
    own = put(model / "step_predictor", TREES, TREES_HIDDEN, NETWORK)
    best = choose(model)
    assert best == PredictorChoice("catboost+hidden", own)
    assert best.hidden_reader == str(own / NETWORK)
    assert choose(model, "catboost").hidden_reader == ""
    assert choose(model, "hidden").hidden_reader == str(own / NETWORK)
    assert choose(model, "history").folder is None


def test_what_is_asked_for_and_not_there_is_an_error_that_says_how_to_make_it(model: Path) -> None:
    put(model / "step_predictor", TREES)
    with pytest.raises(ConfigError, match="no step predictor of kind 'hidden' in .*train-predictor"):
        choose(model, "hidden")
    with pytest.raises(ConfigError, match="no step predictor of kind 'auto' in /nowhere"):
        choose(model, folder=Path("/nowhere"))


def test_a_policy_that_wants_no_predictions_gets_none(model: Path) -> None:
    put(model / "step_predictor", TREES)
    config = ServerConfig(policy="infaas")
    assert choose_predictor(config, make_policy(config), str(model)) == PredictorChoice("history")
